"""`python -m mobilenetv3_ref.train`."""

from .main import command

if __name__ == "__main__":
    command()
