"""Door 2: public names, Hugging Face configs and ModelSpecs become Graphs without torch."""

from planner.models.resolve import list_models, resolve, spec_from_config, spec_graph
from planner.models.spec import Experts, Image, LatentAttention, ModelSpec

__all__ = ["Experts", "Image", "LatentAttention", "ModelSpec", "list_models", "resolve", "spec_from_config", "spec_graph"]
