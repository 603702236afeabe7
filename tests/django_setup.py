"""Django, configured once in a process, whichever test needs it first."""


def set_up_django() -> None:
    """Settings that are nobody's, and its applications ready."""
    import django
    from django.apps import apps
    from django.conf import settings

    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
    if not apps.ready:
        django.setup()
