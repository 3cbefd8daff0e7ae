"""`python -m muonloom`: the `muonloom` command, as torchrun starts it."""

from muonloom.cli import main

if __name__ == "__main__":
    main()
