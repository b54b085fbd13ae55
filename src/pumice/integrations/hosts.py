"""What is asked of other software before pumice works in it."""

from importlib.metadata import version

from packaging.version import Version

from pumice.errors import UserError


def require(package: str, oldest: str) -> None:
    """Refuse a host that is too old.

    Args:
        package: Name of an installed package.
        oldest: The oldest version that will do.

    Raises:
        UserError: It is older.
    """
    if Version(installed := version(package)) < Version(oldest):
        raise UserError(f"{package} {installed} is too old for pumice: install {package}>={oldest}")
