"""The quickstart on Flower's simulation engine: FedAvg as it was, then SCAFFOLD and FedLPA by fedfuse.

Run `python examples/flower_quickstart/run.py`.
"""

from __future__ import annotations

import logging
from types import ModuleType

import client_app
import fused_client_app
import fused_server_app
import server_app
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from task import CLIENTS

BACKEND = {
    "init_args": {"include_dashboard": False, "log_to_driver": False},
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
}


def simulate(server: ModuleType, client: ModuleType, **config: str | int) -> None:
    """As `flwr run` would, with this run config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        context.run_config = dict(config)
        torch.manual_seed(0)
        server.main(grid, context)

    run_simulation(app, client.app, CLIENTS, "ray", BACKEND)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    simulate(server_app, client_app, rounds=3)
    simulate(fused_server_app, fused_client_app, rounds=3, method="scaffold")
    simulate(server_app, client_app, rounds=1)
    simulate(fused_server_app, fused_client_app, rounds=1, method="fedlpa")
