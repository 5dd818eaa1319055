"""The same ClientApp, for whatever method the server fuses by."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from task import Net, load_part

import fedfuse.flower

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    rows = load_part(int(context.node_config["partition-id"]))
    return fedfuse.flower.train(msg, context, Net, rows, epochs=10, lr=0.1, batch_size=32)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    return fedfuse.flower.evaluate(msg, context, Net, load_part(int(context.node_config["partition-id"])))
