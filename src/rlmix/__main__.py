"""`python -m rlmix`: the command line, where its script is not on the path."""

from rlmix.cli import main

if __name__ == "__main__":
    main()
