"""The `lox` command: `main` is what the console script and `python -m lox` call.

`_app` has the commands and their arguments (Typer), the others what they do. Nothing here starts a JAX backend: a
training may own the accelerator.
"""

import sys


def main() -> None:
    """Run the command line, and exit."""
    try:
        import typer
    except ImportError:
        sys.exit('error: the `lox` command needs Typer: pip install "lox-jax[cli]"')
    del typer
    import jax

    from lox._command import _app

    # No command needs a backend. Should one ever start, it is not that of an accelerator.
    jax.config.update("jax_platforms", "cpu")

    _app.run()
