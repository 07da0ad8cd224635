"""What is said to clients when something is wrong, in OpenAI's words. Knows exceptions and status codes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from smcdecode.errors import NoSurvivors, SMCDecodeError
from smcdecode.integrations.server.runner import Busy

__all__ = ["RESPONSES", "ErrorBody", "Problem", "problem_of", "response", "validation"]

_SHOWN = 5  # of the complaints about one body


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is no answer."""

    error: _Error


class Problem(Exception):
    """A response that is no answer.

    Args:
        status: of HTTP.
        message: says what to do instead.
        param: the field that is wrong.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def response(problem: Problem) -> JSONResponse:
    """The response that tells of it."""
    return JSONResponse(problem.body(), problem.status, headers=problem.headers)


def problem_of(error: Exception) -> Problem:
    """What to tell of an error that a request met."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Busy):
        return Problem(429, "the queue is full: try again later", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, TimeoutError):
        return Problem(504, "the answer took too long: ask for fewer tokens or particles", code="timeout")
    if isinstance(error, NoSurvivors):
        return Problem(422, str(error), code="no_survivors")
    if isinstance(error, SMCDecodeError):
        return Problem(400, str(error), code=type(error).__name__)
    return Problem(500, "the engine failed at this request", code=type(error).__name__)


def validation(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """What to tell of a body that is not as it should be: where, and why."""
    told = [f"{_place(error)}: {str(error['msg']).removeprefix('Value error, ')}" for error in errors[:_SHOWN]]
    return Problem(400, "; ".join(told), param=_place(errors[0]) if errors else None, code="invalid_body")


def _place(error: Mapping[str, Any]) -> str:
    """The field, without what no text can hold."""
    place = ".".join(str(part) for part in error["loc"] if part != "body") or "body"
    return place[:200].encode("utf-8", "replace").decode()


RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The body cannot be served; the message names the field and the remedy."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "No such model."},
    408: {"model": ErrorBody, "description": "The body did not come in time."},
    413: {"model": ErrorBody, "description": "The body is too long."},
    422: {"model": ErrorBody, "description": "No particle of any run satisfied the constraints."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to come back."},
    503: {"model": ErrorBody, "description": "The server is stopping, or its engine has stopped."},
    504: {"model": ErrorBody, "description": "The answer was not ready in time."},
}
