"""The `geneva` command as `python -m geneva`, for a Python whose scripts are not on the PATH."""

from geneva.cli import main

if __name__ == "__main__":
    main()
