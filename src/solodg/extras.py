"""What is not installed by default, and how to get it."""

from solodg.errors import UserError


def missing_extra(extra: str, what: str, error: ModuleNotFoundError) -> UserError:
    return UserError(
        f"{what} is not installed ({error.name} is missing). Try: pip install 'solodg[{extra}]'"
    )
