"""The parts of a report. A probe is a file of this folder and a line of this table, or comes from outside."""

from gare.analysis.probe import Probe
from gare.analysis.probes.ablations_probe import AblationsProbe
from gare.analysis.probes.bottleneck_probe import BottleneckProbe
from gare.analysis.probes.coverage_probe import CoverageProbe
from gare.analysis.probes.dynamics_probe import DynamicsProbe
from gare.analysis.probes.efficiency_probe import EfficiencyProbe
from gare.analysis.probes.geometry_probe import GeometryProbe
from gare.analysis.probes.hard_negatives_probe import HardNegativesProbe
from gare.analysis.probes.tension_probe import TensionProbe
from gare.analysis.probes.trust_region_probe import TrustRegionProbe
from gare.registry import Registry

PROBES: Registry[type[Probe]] = Registry(
    "probe",
    {  # in the order of the report
        "tension": TensionProbe,
        "geometry": GeometryProbe,
        "dynamics": DynamicsProbe,
        "trust_region": TrustRegionProbe,
        "hard_negatives": HardNegativesProbe,
        "coverage": CoverageProbe,
        "efficiency": EfficiencyProbe,
        "ablations": AblationsProbe,
        "bottleneck": BottleneckProbe,
    },
)

__all__ = ["PROBES"]
