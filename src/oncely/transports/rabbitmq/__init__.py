"""RabbitMQ, by pika. Imported only when its URL is opened."""

from oncely.transports.rabbitmq.transport import RabbitmqTransport as RabbitmqTransport
from oncely.transports.rabbitmq.transport import Settings as Settings
