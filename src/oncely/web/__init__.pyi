from .app import dashboard
from .proxies import ProxyAuth
from .site import Mask
from .users import Auth, Role, Scope, User

__all__ = [
    "Auth",
    "Mask",
    "ProxyAuth",
    "Role",
    "Scope",
    "User",
    "dashboard",
]
