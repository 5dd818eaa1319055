"""A ClientApp as in Flower's own quickstart."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, fit, load_part, score

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    x, y = load_part(int(context.node_config["partition-id"]))
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss = fit(model, x, y, epochs=10, lr=0.1, batch_size=32)
    metrics = MetricRecord({"loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    x, y = load_part(int(context.node_config["partition-id"]))
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss, accuracy = score(model, x, y)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
