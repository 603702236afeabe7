from .access import Auth, ProxyAuth, Role, Scope, User
from .app import dashboard
from .site import Mask

__all__ = [
    "Auth",
    "Mask",
    "ProxyAuth",
    "Role",
    "Scope",
    "User",
    "dashboard",
]
