"""The same ServerApp with a method of fedfuse as its strategy."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from server_app import test
from task import Net

from fedfuse.flower import FuseStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds, method = int(context.run_config["rounds"]), str(context.run_config["method"])
    strategy = FuseStrategy(method, Net, clients="fedfuse", quorum=0.8)
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds, evaluate_fn=test)
    print(f"{method}: {result.evaluate_metrics_serverapp[rounds]['accuracy']:.0%} after {rounds} round(s)")
