"""Transports: connections to brokers, one module for each kind of broker."""
