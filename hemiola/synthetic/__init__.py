"""Models of the true shapes and stored formats with drawn weights: for measurements and tests without a checkpoint.

The weights are no trained model's, but behave like one in what costs time: routing spreads over the experts, and
activations stay of order one through all layers. They are made where they are used, a matrix at a time
(`open_synthetic`), or written to disk as a checkpoint (`write_checkpoint`).
"""

from hemiola.synthetic.geometry import NAMES, Geometry, geometry
from hemiola.synthetic.manifest import SyntheticManifest, open_synthetic
from hemiola.synthetic.write import write_checkpoint

__all__ = ["NAMES", "Geometry", "SyntheticManifest", "geometry", "open_synthetic", "write_checkpoint"]
