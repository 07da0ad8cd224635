"""Requests that come and go over one page budget: admit, run, finish, cancel. Knows queues, no weights.

A request is admitted when the most it can ever hold is unreserved, first come first served; so a run that has begun can
always end, and nothing is ever taken back from it.
"""

from collections import deque
from collections.abc import Generator, Sequence

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.engine.cache import bytes_per_page
from smcdecode.engine.cycles import Cycle
from smcdecode.engine.fixed.admission import pages_of, serves
from smcdecode.engine.fixed.group import FixedGroup
from smcdecode.engine.group import Group, Outcome
from smcdecode.engine.memory import Budget, plan_memory
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.passes import Stores
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.errors import InvalidOption, OutOfPages

__all__ = ["Cycle", "Outcome", "Scheduler"]

_RESTED = 4  # recorded groups that are kept: recording anew takes a second or more


class Scheduler:
    """Runs any requests on one target model over one pool of pages; those of equal method in one batch.

    Args:
        p: the model of all targets.
        drafts: the models that methods may draft with.
        budget: what may be used.
        stats: counts what it costs.

    Attributes:
        recorded: whether cycles are recorded where they can be; by default as the target's model says.
    """

    def __init__(self, p: LanguageModel, drafts: Sequence[LanguageModel], budget: Budget, stats: Stats) -> None:
        self.budget, self.stats = budget, stats
        self._drafts = drafts
        self.stores = Stores(p, drafts, budget.pages, budget.page_size)
        self.stats.pages = budget.pages
        self.recorded = isinstance(p, LanguageModel) and p.graphs
        self.stats.attention = p.attention.name if isinstance(p, LanguageModel) else ""
        self.groups: list[
            Group | FixedGroup
        ] = []  # those that have something to do, in the order of their first request
        self._rested: list[FixedGroup] = []  # without requests, but with their recordings, the latest first
        self._waiting: deque[Request] = deque()
        self._pages = self._workspace = 0  # reserved

    @classmethod
    def of(cls, requests: Sequence[Request], *, memory: int, page_size: int, stats: Stats) -> "Scheduler":
        """A scheduler for requests of one target and method that are all known beforehand, with them in its queue.

        Raises:
            OutOfPages: the largest does not fit into ``memory`` bytes alone.
        """
        p, *drafts = requests[0].models
        needs = [most_pages(request, page_size) for request in requests]
        budget = plan_memory(
            memory, needs, page_bytes([p, *drafts], page_size), _workspace(requests[0]),
            page_size=page_size, max_tokens=max(request.max_tokens for request in requests),
        )  # fmt: skip
        scheduler = cls(p, drafts, budget, stats)
        for request in requests:
            scheduler.add(request)
        return scheduler

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have begun."""
        return sum(len(group.requests) for group in self.groups)

    @classmethod
    def open(
        cls, p: LanguageModel, drafts: Sequence[LanguageModel], method: SMC, *, lanes: int, memory: int,
        max_tokens: int, page_size: int, stats: Stats,
    ) -> "Scheduler":  # fmt: skip
        """A scheduler for requests to come.

        Args:
            p: the model of all targets.
            drafts: the models that methods may draft with.
            method: a typical one.
            lanes: requests of one method that run at once.
            memory: bytes for keys, values, logits and laws.
            max_tokens: of the longest continuation.
            page_size: tokens a page.
            stats: counts what it costs.

        Raises:
            OutOfPages: ``memory`` bytes do not hold one request of that method and length.
        """
        each, page = lane_bytes(method, p.vocabulary.size), page_bytes([p, *drafts], page_size)
        workspace = max(each, min(lanes * each, memory // 2))
        own = method.slots * -(-max_tokens // page_size)
        longest = max_tokens if p.context is None else p.context
        pages = min(lanes * (own + -(-longest // page_size)), (memory - workspace) // page)
        if pages <= own:
            raise OutOfPages(
                f"{memory:,} bytes are too few for one request of {max_tokens} tokens, whose logits take {each:,} and "
                f"each of whose {own + 1} pages takes {page:,}: raise memory, or lower max_tokens or particles"
            )
        return cls(p, drafts, Budget(lanes, pages, workspace, page_size, max_tokens), stats)

    def add(self, request: Request) -> None:
        """Queue a request, before or during :meth:`run`; raises what :meth:`check` does."""
        self.check(request)
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuse what could not run, were it alone; may be called from any thread.

        Raises:
            OutOfPages: it does not fit.
            InvalidOption: it is about other models, or longer than the budget says.
        """
        budget = self.budget
        self._check_models(request)
        if request.max_tokens > budget.max_tokens:
            raise InvalidOption(f"max_tokens is at most {budget.max_tokens} here; got {request.max_tokens}")
        pages, workspace = most_pages(request, budget.page_size), _workspace(request)
        if pages > budget.pages or workspace > budget.workspace:
            raise OutOfPages(
                f"the request may need {pages} pages and {workspace:,} bytes of logits, but there are {budget.pages} "
                f"pages and {budget.workspace:,} bytes: lower max_tokens, particles or block, or shorten the prompt"
            )

    def cancel(self, index: int) -> bool:
        """Forget a waiting request, or end a running one and free its pages at once.

        To be called between cycles: where :meth:`run` has yielded. Says whether there was such a request.
        """
        for request in self._waiting:
            if request.index == index:
                self._waiting.remove(request)
                return True
        for group in self.groups:
            request_ended = group.drop(index)
            if request_ended is not None:
                self._settle([request_ended])
                return True
        return False

    def run(self) -> Generator[list[Outcome], None, None]:
        """Cycle by cycle, the outcomes of the requests that finished in it: often none. Ends when none is left."""
        with self.stats.clock("total"):
            try:
                while self._waiting or self.groups:
                    self._admit()
                    for group in tuple(self.groups):
                        if group.requests:
                            outcomes = self._cycle(group)
                            self._settle([outcome.request for outcome in outcomes])
                            yield outcomes
            finally:
                for group in self.groups:
                    self._settle(group.requests)
                    self._rest(group)
                self.groups = []

    def _cycle(self, group: Group | FixedGroup) -> list[Outcome]:
        try:
            return group.cycle()
        except BaseException:
            self.stores.prefixes.clear()  # what was to be read may not have been
            raise

    def latest(self) -> list[Cycle]:
        """The last cycle of every running request."""
        return [cycle for group in self.groups for cycle in group.latest()]

    def settled(self) -> list[tuple[Request, list[int]]]:
        """Every running request and its tokens that are final: those that its living particles share."""
        return [pair for group in self.groups for pair in group.settled()]

    def close(self) -> None:
        """Let the memory of keys and values go at once; nothing runs here any more."""
        self._rested.clear()
        self.stores.close()

    def audit(self) -> None:
        """Check every page: free, kept, or held as often as counted; AssertionError names the first that is wrong."""
        self.stores.prefixes.audit()
        self.stores.pool.audit([pages for group in self.groups for pages in group.holders()])

    # ---- inside

    def _admit(self) -> None:
        """Give lanes to waiting requests while lanes, pages and workspace last; forget groups without requests."""
        for group in self.groups:
            if not group.requests:
                self._rest(group)
        self.groups = [group for group in self.groups if group.requests]
        while self._waiting and self._fits(self._waiting[0]) and self._group(self._waiting[0]).place(self._waiting[0]):
            request = self._waiting.popleft()
            self._pages += self._reserve(request)
            self._workspace += _workspace(request)

    def _check_models(self, request: Request) -> None:
        p, *drafts = request.models
        if p is not self.stores.p or any(id(q) not in self.stores.drafts for q in drafts):
            known = ", ".join(q.name for q in self._drafts) or "no draft"
            asked = " and ".join(model.name for model in request.models)
            raise InvalidOption(f"this scheduler runs {self.stores.p.name} with {known}; got {asked}")

    def _fits(self, request: Request) -> bool:
        pages = self._pages + self._cost(request)
        return pages <= self.budget.pages and self._workspace + _workspace(request) <= self.budget.workspace

    def _recorded(self, request: Request) -> bool:
        """Whether a request's cycles are recorded; such a request's prompt shares no page with another's."""
        return self.recorded and serves(request)

    def _cost(self, request: Request) -> int:
        """Pages to reserve for a request now."""
        if self._recorded(request):
            return pages_of(request, self.budget.page_size)
        return own_pages(request, self.budget.page_size) + self.stores.prefixes.cost(request.prompt.tokens)

    def _reserve(self, request: Request) -> int:
        if self._recorded(request):
            return pages_of(request, self.budget.page_size)
        return own_pages(request, self.budget.page_size) + self.stores.prefixes.reserve(request.prompt.tokens)

    def _give_back(self, request: Request) -> int:
        if self._recorded(request):
            return pages_of(request, self.budget.page_size)
        return own_pages(request, self.budget.page_size) + self.stores.prefixes.settle(request.prompt.tokens)

    def _group(self, request: Request) -> Group | FixedGroup:
        """The group of a request's method, made if there is none."""
        for group in self.groups:
            if isinstance(group, FixedGroup) == self._recorded(request) and group.takes(request):
                return group
        rested = next((group for group in self._rested if self._recorded(request) and group.takes(request)), None)
        if rested is not None:
            self._rested.remove(rested)
        self.groups.append(rested or self._new_group(request))
        return self.groups[-1]

    def _rest(self, group: Group | FixedGroup) -> None:
        """End a group; one that records is kept for requests to come, if it is one of the last few."""
        group.stop()
        if isinstance(group, FixedGroup):
            self._rested = [group, *self._rested][:_RESTED]

    def _new_group(self, request: Request) -> Group | FixedGroup:
        budget = self.budget
        if not self._recorded(request):
            sizes = {"lanes": budget.lanes, "max_tokens": budget.max_tokens}
            return Group(request.method, self.stores, **sizes, stats=self.stats)
        alike = [r for r in (request, *self._waiting) if r.method == request.method]
        longest = max(len(r.prompt.tokens) + r.max_tokens for r in alike)
        return FixedGroup(
            request, self.stores, lanes=budget.lanes, max_tokens=budget.max_tokens, longest=longest, stats=self.stats
        )

    def _settle(self, requests: Sequence[Request]) -> None:
        """Take back what was reserved for requests that are over."""
        self._pages -= sum(self._give_back(request) for request in requests)
        self._workspace -= sum(_workspace(request) for request in requests)
        self.stats.pages_peak = self.stores.pool.peak


def most_pages(request: Request, page_size: int) -> int:
    """Most pages a request can ever hold."""
    if isinstance(request.models[0], LanguageModel) and request.models[0].graphs and serves(request):
        return pages_of(request, page_size)
    return -(-len(request.prompt.tokens) // page_size) + own_pages(request, page_size)


def own_pages(request: Request, page_size: int) -> int:
    """Most pages of a request's own tokens."""
    return request.smc.slots * -(-request.max_tokens // page_size)


def page_bytes(models: Sequence[LanguageModel], page_size: int) -> int:
    """Bytes of one page in the stores of some models."""
    return max(1, sum(bytes_per_page(model.layout, page_size) for model in models))


def _workspace(request: Request) -> int:
    return lane_bytes(request.smc, request.target.model.vocabulary.size)


def lane_bytes(method: SMC, vocab_size: int) -> int:
    """Logits and laws: float32 rows of the target at K+1 positions three times over, of the draft at K twice."""
    block = method.proposal.longest if isinstance(method.proposal, Draft) else method.proposal.ahead
    return method.slots * vocab_size * 4 * (3 * (block + 1) + 2 * block)
