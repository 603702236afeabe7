from .consumer import Consumer

__all__ = ["Consumer"]
