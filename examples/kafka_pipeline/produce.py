"""A producer that sends every fourth order twice; started again, it sends all of them again."""

import os

import oncely

COUNT = 200

broker = oncely.open_transport(f"kafka://{os.environ['BROKERS']}")
orders = [
    oncely.Message(f"order-{n}", b'{"amount": %d}' % (n * 10), "placed", key=f"customer-{n % 7}")
    for n in range(COUNT)
]
broker.publish("orders", orders + orders[::4])
broker.close()
