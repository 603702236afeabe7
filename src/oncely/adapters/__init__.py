"""Adapters: handle messages once in the workers of other frameworks. Each needs its framework."""
