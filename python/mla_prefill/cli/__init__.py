"""The command ``mla-prefill``."""


def main() -> None:
    try:
        from mla_prefill.cli.app import app
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"mla-prefill needs the package {error.name}: pip install 'mla-prefill[cli]' brings what its commands use"
        ) from error
    app()
