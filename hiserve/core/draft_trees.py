"""Which models and settings can have drafts in trees."""

from __future__ import annotations

from typing import NamedTuple

from hiserve.config.options import Options
from hiserve.config.settings import AUTO_TREES, TreeShape
from hiserve.core.step_memory import ModelFacts
from hiserve.errors import ConfigError

_LEAST_TOKENS = 2 * AUTO_TREES[-1].num_draft + 3  # of a request, for which the costs of trees can be measured


class Obstacle(NamedTuple):
    """Why drafts are chains."""

    fact: str
    remedy: str


def obstacle_of(given: Options, model: ModelFacts, proposer: str, why_none: str) -> Obstacle | None:
    """Returns why drafts of a proposer (``--spec``, resolved for the reason ``why_none``) cannot be trees; None if they can."""
    leave_one, leave_out = "Leave one of them out.", "Leave it out: drafts are chains then."
    of_heads = "only keys and values of heads can be moved to the places of accepted drafts"
    models = [model.step, *([] if model.draft is None else [model.draft.step.step])]
    has_windows = model.window > 0 and given.cache.window_pages != 0 and not given.cache.kv_canary
    reason = f" ({why_none})" if why_none else ""
    facts = [
        (
            proposer in ("off", "ngram"),
            f"--spec is {proposer}{reason}, and trees are grown by a head or a draft model",
            "Name one, or leave --spec-tree out.",
        ),
        (
            given.spec.spec_steps != "auto",
            f"--spec-steps is {given.spec.spec_steps}, which is a number of drafts too",
            leave_one,
        ),
        (given.parallel.tp > 1, f"--tp is {given.parallel.tp}, and ranks of a group draft in chains", leave_one),
        (
            given.runner.exact,
            "--exact is given, and drafts of trees lie in other slots than the tokens that they become",
            leave_one,
        ),
        (
            any(each.latent_elements for each in models),
            f"latents or rows of several kinds are stored, and {of_heads}",
            leave_out,
        ),
        (model.carried is not None, f"rows carry states along, and {of_heads}", leave_out),
        (
            has_windows,
            "layers with a window have pages of their own, in which accepted drafts cannot be moved",
            "Use --window-pages 0, or leave --spec-tree out.",
        ),
    ]
    return next((Obstacle(fact, remedy) for is_so, fact, remedy in facts if is_so), None)


def choose_trees(given: Options, model: ModelFacts, length: int, proposer: str, why_none: str) -> tuple[str, str]:
    """Returns ``--spec-tree``, of which ``auto`` is off where there are no trees, and the reason for that.

    The longest request has ``length`` tokens; the proposer is as in ``obstacle_of``.

    Raises:
        ConfigError: A shape was given that cannot be made, or for which there is an obstacle.
    """
    asked = given.spec.spec_tree
    if asked not in ("off", "auto"):
        TreeShape.read(asked)
    obstacle = None if asked == "off" else obstacle_of(given, model, proposer, why_none)
    if asked == "auto":
        if obstacle is None and length < _LEAST_TOKENS:
            return "off", f"requests of {length} tokens are too short to measure what trees cost"
        return ("auto", "") if obstacle is None else ("off", obstacle.fact)
    if obstacle is not None:
        raise ConfigError(f"--spec-tree is {asked}, but {obstacle.fact}. {obstacle.remedy}", param="spec_tree")
    return asked, ""
