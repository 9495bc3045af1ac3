"""The models of a library: what there is, going back to one, forgetting one. Changing to one is a job."""

from __future__ import annotations

from collections.abc import Callable

from anyio import to_thread
from fastapi import APIRouter

from gare.errors import LibraryError
from gare.model.model_inventory import ListedModel, list_models
from gare.serve import api_schemas as schemas
from gare.serve.problems import Problem
from gare.serve.service import Service, SharedService

router = APIRouter(prefix="/models", tags=["library"])


@router.get(
    "", response_model=schemas.Models, summary="Vectors that the library keeps, and models to change to"
)
def get_models(service: SharedService) -> schemas.Models:
    return describe_models(service)


@router.post("/use", response_model=schemas.Models, summary="Search with vectors that are kept, at once")
async def use_model(body: schemas.ChosenSet, service: SharedService) -> schemas.Models:
    await _change(service, lambda: service.library.use_model(body.set))
    return await to_thread.run_sync(describe_models, service)


@router.post("/forget", response_model=schemas.Models, summary="Free vectors that are not searched")
async def forget_model(body: schemas.ChosenSet, service: SharedService) -> schemas.Models:
    await _change(service, lambda: service.library.forget_model(body.set))
    return await to_thread.run_sync(describe_models, service)


async def _change(service: Service, change: Callable[[], object]) -> None:
    service.check_writable()
    if service.jobs.running is not None:
        raise Problem(409, "job_running", "a job is running; wait for it, or cancel it")
    try:
        await to_thread.run_sync(change)
    except LibraryError as error:
        raise Problem(409, "not_possible", str(error)) from None


def describe_models(service: Service) -> schemas.Models:
    """The sets of the library, and the models on this machine that are none of them."""
    sets = [schemas.SetState(**service.library.describe_set(found)) for found in service.library.sets()]
    known = {found.model for found in sets}
    return schemas.Models(
        sets=sets,
        available=[_available(model) for model in list_models() if model.is_here and model.name not in known],
    )


def _available(model: ListedModel) -> schemas.AvailableModel:
    return schemas.AvailableModel(
        name=model.name, dim=model.dim, languages=list(model.languages), licence=model.licence
    )


def check_model(service: Service, name: str | None) -> str:
    """The name of a model that a job may change to: no visitor may load any folder, or start a download."""
    models = describe_models(service)
    if name not in {*(found.model for found in models.sets), *(found.name for found in models.available)}:
        raise Problem(
            422, "no_such_model", "name one of the models at /api/v1/models; for others: gare index --model"
        )
    assert name is not None
    return name
