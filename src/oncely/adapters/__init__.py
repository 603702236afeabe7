"""Adapters: messages handled once by workers that users already have. Each needs its framework."""
