"""fedfuse for people who use Flower: whole experiments as apps, or any method in an app of yours.

`FuseStrategy` is a strategy of Flower's Message API for your ServerApp. Where a method changes only what the server
does, your ClientApp stays as it is; where it changes what clients do, `train` does a client's round as
the server asked, and `evaluate` scores what it sent.
"""

from fedfuse.flower.client import evaluate, train
from fedfuse.flower.run import server_app, simulate
from fedfuse.flower.site import site_app
from fedfuse.flower.strategy import FuseStrategy

__all__ = ["FuseStrategy", "evaluate", "server_app", "simulate", "site_app", "train"]
