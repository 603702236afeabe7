"""RabbitMQ, through pika. Imported only when its URL is opened."""
