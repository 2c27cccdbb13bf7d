"""``python -m hpcrl``: the command line, also where its script is not in ``PATH``."""

from hpcrl.cli.main import main

if __name__ == "__main__":
    main()
