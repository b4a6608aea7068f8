"""A model cut into stages that follow one another, each with about as many parameters as any other."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from torch import fx, nn

from pipeline.config import ConfigError


def cut(model: nn.Module, count: int) -> list[nn.Module]:
    """Return as many stages, which share the model's layers; ConfigError if it cannot be cut so."""
    graph = traced(model)
    blocks = list(blocks_of(graph))
    # What goes on from each block.
    leaving = [*(entering for entering, _ in blocks[1:]), next(iter(graph.output_node().all_input_nodes))]
    if len(blocks) < count:
        why = f"{type(model).__name__} can be cut in {len(blocks) - 1} places, where one tensor alone goes on"
        raise ConfigError(f"dist.strategy: pipeline needs a stage for each of {count} ranks, and {why}; lower dist.world_size, or set ddp")
    sizes = [sum(one.numel() for one in stage_of(model, *block, out).parameters()) for block, out in zip(blocks, leaving, strict=True)]
    bounds = [0, *best_cuts(tuple(sizes), count), len(blocks)]
    stages = [
        stage_of(model, blocks[begin][0], [node for _, nodes in blocks[begin:end] for node in nodes], leaving[end - 1])
        for begin, end in pairwise(bounds)
    ]
    owned = [id(one) for stage in stages for one in [*stage.parameters(), *stage.buffers()]]
    if len(set(owned)) < len(owned):
        raise ConfigError(f"dist.strategy: pipeline cannot cut {type(model).__name__}, of which two stages share a weight; set ddp")
    unused = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in owned]
    if unused:
        raise ConfigError(f"dist.strategy: pipeline cannot train {unused[0]}, which takes no part in {type(model).__name__}'s forward")
    return stages


class Tracer(fx.Tracer):
    """torch's own takes layers of other classes apart; a convolution chooses its kernels when it is called."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module) -> fx.Graph:
    """Return what a model computes, as a graph of its layers."""
    was_training = model.training
    try:
        found = [fx.GraphModule(model, Tracer().trace(model.train(training))) for training in (True, False)]
    except (ValueError, TypeError, NotImplementedError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"dist.strategy: pipeline cannot cut {type(model).__name__}, which torch.fx cannot trace ({error}); set ddp"
        ) from None
    finally:
        model.train(was_training)
    if found[0].code != found[1].code:
        raise ConfigError(
            f"dist.strategy: pipeline cannot cut {type(model).__name__}, which asks in its forward whether it is trained; set ddp"
        )
    return found[0].graph


def blocks_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield what enters a block and its nodes; between two blocks one tensor alone goes on."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    places = {node: place for place, node in enumerate(nodes)}
    # Where a value is used for the last time.
    until = {node: max((places.get(user, len(nodes)) for user in node.users), default=0) for node in nodes}
    entering, block = nodes[0], list[fx.Node]()
    for place, node in enumerate(nodes[1:], 1):
        block.append(node)
        going_on = [one for one in nodes[: place + 1] if until[one] > place]
        if len(going_on) == 1:
            yield entering, block
            entering, block = going_on[0], []
    assert not block


def stage_of(model: nn.Module, entering: fx.Node, nodes: list[fx.Node], leaving: fx.Node) -> nn.Module:
    """Return some nodes as a module of one tensor, which shares the model's layers."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copies[entering] = graph.placeholder("entering")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda one: copies[one])
    graph.output(copies[leaving])
    return fx.GraphModule(model, graph)


def best_cuts(sizes: tuple[int, ...], count: int) -> list[int]:
    """Return where to cut, so that the largest stage is as small as possible, and then the others are as equal."""

    @cache
    def best(begin: int, left: int) -> tuple[int, int, tuple[int, ...]]:
        if left == 1:
            return sum(sizes[begin:]), sum(sizes[begin:]) ** 2, ()
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for end in range(begin + 1, len(sizes) - left + 2):
            own = sum(sizes[begin:end])
            largest, squares, cuts = best(end, left - 1)
            found.append((max(own, largest), own**2 + squares, (end, *cuts)))
        return min(found)

    return list(best(0, count)[2])
