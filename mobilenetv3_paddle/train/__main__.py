"""`python -m mobilenetv3_paddle.train`."""

from .main import command

if __name__ == "__main__":
    command()
