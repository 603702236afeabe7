"""RabbitMQ, by pika. Imported only when its URL is opened."""
