# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from kvfold.methods.base import Encoder, LastQueries, Needs, Stages, register
from kvfold.store.pruned import Pruning


@register(
    "think",
    paper="arXiv 2407.21018",
    formula="""
        s[h, c] = mean_{q in h, i} Q[q, i, c]²·mean_t k[h, t, c]²,  i: the last queries
        dropped = the ⌊ratio·D⌋ channels c of lowest s
    """,
)
@dataclass(frozen=True)
class ThinK(Encoder):
    """Drops the key channels that the prompt's last queries use least; values stay raw.

    1. A channel's score is the mean q² of the last `queries` queries times the mean k² of all keys.
    2. Each KV head drops the share `ratio` of its channels, once and for all later keys.
    3. The `recent` newest keys and generated ones stay raw.

    Only keys shrink, so an entry loses `ratio` / 2. The authors' code repeats keys to all query
    heads and prunes each; here the queries of a group are averaged for its one KV head. Raises
    KvfoldError for options out of range.
    Source: Xu et al., section 3; SalesforceAIResearch/ThinK `kv_pruning_utils.py`.
    """

    ratio: float = 0.4  # share of a key's channels that is dropped
    recent: int = 32  # newest keys that stay raw
    queries: int = 32  # last queries that score the channels

    def stages(self) -> Stages:
        return Stages(needs=Needs(LastQueries(self.queries)), encode=self.encoding())

    def encoding(self) -> Pruning:
        return Pruning(ratio=self.ratio, recent=self.recent, queries=self.queries)
