"""Door 2: names, configs and specs against published totals and against what transformers builds and autograd keeps."""

import pytest

from planner.models import list_models, resolve, spec_graph

PUBLISHED = [
    ("gpt2", 124_439_808),
    ("gpt2-xl", 1_557_611_200),
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
]


@pytest.mark.parametrize(("name", "total"), PUBLISHED)
def test_parameter_totals_are_the_published_ones(name, total):
    assert spec_graph(resolve(name), sequence=128).num_parameters == total


@pytest.mark.parametrize(
    "text", ["llama-3-70b", "meta-llama/Meta-Llama-3-70B", "llama3-70b", "Llama-3-70B-Instruct", "meta-llama/Llama-3.1-70B"]
)
def test_names_as_people_type_them(text):
    assert resolve(text).name == "llama3-70b"


def test_every_listed_model_makes_a_graph():
    for name in list_models():
        graph = spec_graph(resolve(name), sequence=256)
        assert graph.num_parameters > 0
        assert graph.layers[0].kind_id == graph.kinds[0].kind_id
