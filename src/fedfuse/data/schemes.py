"""How training rows may be shared out: each scheme is a small model that an experiment file can hold.

`kind` says which one is meant; unknown keys and impossible numbers are refused with a sentence.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
Compat = Literal["niid-bench"]


def _refuse(sentence: str) -> PydanticCustomError:
    # A literal sentence: braces in what the user wrote must not be taken for placeholders.
    return PydanticCustomError("impossible", "{sentence}", {"sentence": sentence})


def _above_zero(value: float) -> float:
    if value <= 0:
        raise _refuse(f"it is {value:g}, expected a number above 0; small values give very different clients")
    return value


def _at_least_one(value: int) -> int:
    if value < 1:
        raise _refuse(f"it is {value}, expected at least 1")
    return value


Positive = Annotated[float, AfterValidator(_above_zero)]
Count = Annotated[int, AfterValidator(_at_least_one)]


class Iid(BaseModel):
    """Rows shuffled and dealt out evenly.

    Example:
        >>> Iid()
        Iid(kind='iid')
    """

    model_config = STRICT
    kind: Literal["iid"] = "iid"


class Shares(BaseModel):
    """Rows shuffled and cut at given shares of the training set; what is left over is held out.

    Example:
        >>> Shares(shares=(0.6, 0.15, 0.15)).shares[0]
        0.6
    """

    model_config = STRICT
    kind: Literal["shares"] = "shares"
    shares: Annotated[tuple[Positive, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(self.shares) > 1 + 1e-9:
            raise _refuse(f"the shares sum to {sum(self.shares):g}, expected at most 1; lower some of them")
        return self


class Dirichlet(BaseModel):
    """For each class, the clients' shares are one draw of Dirichlet(alpha, ..., alpha).

    Attributes:
        alpha: small means that few clients share a class; below 0.01 one client has nearly all of it.
        min_rows: every client gets at least this many rows.
        balance: a client that already holds its fair number of rows gets nothing of further classes.
        retries: how often to draw again for `min_rows` before rows are moved to poor clients.
        compat: "niid-bench" repeats the published loop bit for bit.
    """

    model_config = STRICT
    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Positive
    min_rows: Count = 10
    balance: bool = True
    retries: Count = 100
    compat: Compat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.compat and not self.balance:
            raise _refuse("the published loop always balances; leave balance out, or compat")
        return self


class Classes(BaseModel):
    """Each client owns `per_client` classes (#C = k) and an equal part of their rows.

    Client i always owns class i modulo the number of classes; the others are drawn at random.

    Attributes:
        per_client: how many classes a client owns.
        compat: "niid-bench" repeats the published loop bit for bit.
    """

    model_config = STRICT
    kind: Literal["classes"] = "classes"
    per_client: Count
    compat: Compat | None = None


class Labels(BaseModel):
    """Each client owns between `low` and `high` classes, all drawn at random.

    Attributes:
        low: the fewest classes of a client.
        high: the most classes of a client.
        share: "split" cuts a class's rows equally among its owners; "copy" gives each owner all of them,
            so that clients overlap.
    """

    model_config = STRICT
    kind: Literal["labels"] = "labels"
    low: Count = 3
    high: Count = 6
    share: Literal["copy", "split"] = "split"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise _refuse(f"low is {self.low} and high is {self.high}, expected low to be no more than high")
        return self


class Shards(BaseModel):
    """Rows sorted by label, cut into equal shards, and `per_client` shards dealt to each client."""

    model_config = STRICT
    kind: Literal["shards"] = "shards"
    per_client: Count = 2


class Quantity(BaseModel):
    """Labels as in the whole set, but unequal numbers of rows.

    Attributes:
        alpha: sizes follow one draw of Dirichlet(alpha, ..., alpha).
        sigma: sizes follow exp(N(0, sigma²)) instead; give one of the two.
        min_rows: every client gets at least this many rows.
        retries: how often to draw again for `min_rows` before rows are moved to poor clients.
    """

    model_config = STRICT
    kind: Literal["quantity"] = "quantity"
    alpha: Positive | None = None
    sigma: Positive | None = None
    min_rows: Count = 10
    retries: Count = 100

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.alpha is None) == (self.sigma is None):
            raise _refuse("expected either alpha (Dirichlet sizes) or sigma (log-normal sizes); give one of them")
        return self


class Natural(BaseModel):
    """Every row stays with whom the data say it came from: a hospital, a writer, a device."""

    model_config = STRICT
    kind: Literal["natural"] = "natural"


Scheme = Annotated[
    Iid | Shares | Dirichlet | Classes | Labels | Shards | Quantity | Natural, Field(discriminator="kind")
]
"""Any way of sharing out rows; pydantic tells them apart by `kind`."""


class ServerRowsConfig(BaseModel):
    """Rows the server holds itself, from some of the classes, as FedDU needs them.

    Attributes:
        count: how many rows.
        fraction: how many, as a share of the training rows; give one of the two.
        classes: from which classes: how many at random, or which; all classes when left out.
        reserve: this many training rows, the last ones, go to no client, and the server's rows are drawn from them
            (FedDUAP: 10,000 of CIFAR's 50,000). Without it, only the rows drawn are taken from the clients.
    """

    model_config = STRICT
    count: Count | None = None
    fraction: Positive | None = None
    classes: Count | tuple[Annotated[int, Field(ge=0)], ...] | None = None
    reserve: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.count is None) == (self.fraction is None):
            raise _refuse("expected either count or fraction; give one of them")
        if self.fraction is not None and self.fraction >= 1:
            raise _refuse(f"fraction is {self.fraction:g}, expected less than 1: clients need rows too")
        if isinstance(self.classes, tuple) and len(set(self.classes)) != len(self.classes):
            raise _refuse(f"classes names {self.classes}, expected each class once")
        return self

    def row_count(self, rows: int) -> int:
        """How many rows the server asks of a training set of this size."""
        return self.count if self.count is not None else round((self.fraction or 0) * rows)
