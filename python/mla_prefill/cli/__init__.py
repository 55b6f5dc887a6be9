"""The command ``mla-prefill``."""


def main() -> None:
    try:
        from mla_prefill.cli.app import app
        from mla_prefill.cli.console import write_any_encoding

        write_any_encoding()
        app()
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"mla-prefill needs the package {error.name}: pip install 'mla-prefill[cli]' brings what its commands use"
        ) from error
    except KeyboardInterrupt:  # typer handles it once the commands are imported
        raise SystemExit(130) from None
    except OSError as error:  # the help can't be written, to a full disk for example
        raise SystemExit(f"error: {error}") from None
