"""Versions of flashtile and of other distributions."""

__version__ = "0.3.0"


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    from importlib import metadata  # `import flashtile` does without

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
