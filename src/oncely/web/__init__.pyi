from .app import dashboard
from .site import Mask
from .users import Auth, ProxyAuth, Role, Scope, User

__all__ = [
    "Auth",
    "Mask",
    "ProxyAuth",
    "Role",
    "Scope",
    "User",
    "dashboard",
]
