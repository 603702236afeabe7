from .app import dashboard
from .passwords import PasswordAuth, password_line
from .proxies import ProxyAuth
from .site import Mask
from .users import Auth, Role, Scope, User

__all__ = [
    "Auth",
    "Mask",
    "PasswordAuth",
    "ProxyAuth",
    "Role",
    "Scope",
    "User",
    "dashboard",
    "password_line",
]
