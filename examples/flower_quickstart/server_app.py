"""A ServerApp as in Flower's own quickstart: FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Net, load_rows, score

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds = int(context.run_config["rounds"])
    strategy = FedAvg()
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds, evaluate_fn=test)
    print(f"FedAvg: {result.evaluate_metrics_serverapp[rounds]['accuracy']:.0%} after {rounds} round(s)")


def test(_: int, arrays: ArrayRecord) -> MetricRecord:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": score(model, *load_rows()[2:])[1]})
