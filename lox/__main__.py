"""`python -m lox` is the `lox` command."""

from lox._command import main

if __name__ == "__main__":
    main()
