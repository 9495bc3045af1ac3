"""Published methods under one roof: one file each, the table of all of them, registered as interactions."""

from __future__ import annotations

from gare.interaction import INTERACTIONS
from gare.interaction.interaction import Interaction
from gare.interaction.peers.clip4clip import Clip4Clip
from gare.interaction.peers.dicosa import Dicosa
from gare.interaction.peers.diffusion_ret import DiffusionRet
from gare.interaction.peers.dmae import Dmae
from gare.interaction.peers.eercf import Eercf
from gare.interaction.peers.emcl import Emcl
from gare.interaction.peers.hbi import Hbi
from gare.interaction.peers.mean_max_sim import MeanMaxSim
from gare.interaction.peers.neighbor_retr import NeighborRetr
from gare.interaction.peers.peer import load_original
from gare.interaction.peers.pig import Pig
from gare.interaction.peers.prost import Prost
from gare.interaction.peers.tmass import Tmass
from gare.interaction.peers.ts2_net import Ts2Net
from gare.interaction.peers.uatvr import Uatvr

PEERS: dict[str, type[Interaction]] = {
    "clip4clip": Clip4Clip,
    "neighbor_retr": NeighborRetr,
    "emcl": Emcl,
    "dicosa": Dicosa,
    "prost": Prost,
    "hbi": Hbi,
    "uatvr": Uatvr,
    "ts2_net": Ts2Net,
    "eercf": Eercf,
    "dmae": Dmae,
    "mean_max_sim": MeanMaxSim,
    "tmass": Tmass,
    "diffusion_ret": DiffusionRet,
    "pig": Pig,
}
"""Published methods, by the `name` in a model's settings; X-Pool and WTI are `xpool` and `token_wise`."""

for _name, _peer in PEERS.items():
    INTERACTIONS.register(_name, _peer)

__all__ = ["PEERS", "load_original"]
