# What happens in a world: calls, everything that can go wrong, and the end, when all is well again and every book is
# compared.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from tests.simulation import invariants
from tests.simulation.invariants import Broken
from tests.simulation.network import Trouble
from tests.simulation.process import Process
from tests.simulation.sql_model import day_text
from tests.simulation.world import TEAMS, Machine, World

DAY = 86_400.0
FAULTS = (
    "crash", "crash", "restart", "cut", "freeze", "down", "fail_over", "fail_over", "detach", "skew", "limits",
    "limits", "correct", "leave", "close_day", "die_unheard",
)  # fmt: skip


class Plan(Struct, frozen=True):
    """How much of what happens."""

    calls: int = 1000
    pause: float = 0.06  # seconds between calls, of all processes together
    fault_every: float = 4.0  # seconds
    faults: Sequence[str] = FAULTS
    trouble: Trouble = Trouble(slow=0.004, lost=0.004, unheard=0.006, late=0.004, twice=0.01)


# Little is asked, caps move, and one answer in fifty is lost: between them there is time enough to see room that no
# call and no bell calls back.
FEW = tuple(
    Plan(calls=100, pause=1.0, faults=faults, trouble=Trouble(unheard=0.02)) for faults in (("limits",), FAULTS)
)


async def story(world: World, plan: Plan) -> None:
    """Play one world from its beginning to its end."""
    dice = world.dice
    world.trouble = plan.trouble
    for team in TEAMS:
        for scope in _scopes(team):
            change_limits(world, scope, plan.calls)
    for machine in world.machines:
        for _ in range(dice.choice((1, 2))):
            world.start(machine, dice.choice((0.0, 0.0, 0.0, 1.0, -1.5, 3 * DAY, -3 * DAY)))
    befalling = world.loop.create_task(befall(world, plan))
    watching = world.loop.create_task(world.watch())
    while world.calls < plan.calls and world.broken is None:
        processes = [one for one in world.living() if one.has_begun and not one.is_leaving and not one.life.is_frozen]
        if processes:
            process = dice.choice(processes)
            team = dice.choice(tuple(TEAMS))
            task = world.loop.create_task(process.call(team, dice.choice(TEAMS[team])), context=process.context)
            world.calls += 1
            if dice.random() < 0.02:
                world.loop.call_later(0.3 * dice.random(), task.cancel, context=world.context)
        await asyncio.sleep(dice.expovariate(1 / plan.pause))
    befalling.cancel()
    await heal(world)
    invariants.check_rest(world)
    watching.cancel()
    await leave_all(world)
    invariants.check_rest(world)


async def befall(world: World, plan: Plan) -> None:
    """Let things go wrong, one after another and at once."""
    while plan.faults:
        await asyncio.sleep(world.dice.expovariate(1 / plan.fault_every))
        fault = world.dice.choice(plan.faults)
        task = world.loop.create_task(globals()[f"_{fault}"](world))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())


async def heal(world: World) -> None:
    """Put everything right, and wait until it is."""
    world.note("heal")
    world.is_healed = True
    world.trouble = Trouble()
    world.is_down = False
    for machine in world.machines:
        if machine.is_detached:
            attach(machine)
    for process in world.living():
        process.line.is_cut = False
        process.clock.skew = 0.0
        if process.life.is_frozen:
            thaw(world, process)
    for machine in world.machines:
        if not machine.processes:
            world.start(machine)
    await asyncio.sleep(60)


async def leave_all(world: World) -> None:
    """End every process in order."""
    for process in world.living():
        world.loop.create_task(process.leave(), context=process.context)
    for _ in range(100):
        if not world.living():
            return
        await asyncio.sleep(0.5)
    raise Broken(6, f"{[process.name for process in world.living()]} cannot leave")


def change_limits(world: World, scope: str, calls: int) -> None:
    """Set a scope's limits to about what its calls will use, to less or to none."""
    share = calls / len(TEAMS)
    dice = world.dice
    limits = {
        name: int(share * of_one * dice.choice((0.2, 0.6, 1, 3)))
        for name, of_one in (("tokens_per_day", 100), ("nanousd_per_day", 1000), ("nanousd_per_month", 1500))
        if dice.random() < 0.6
    }
    world.run("admin", "set_limits", lambda model, now: model.set_limits(scope, limits, now))


def attach(machine: Machine) -> None:
    """Give a machine its disk back."""
    machine.folder.with_suffix(".away").rename(machine.folder)
    machine.is_detached = False


def thaw(world: World, process: Process) -> None:
    """Let a process go on."""
    process.went_on_at = world.loop.elapsed
    world.loop.thaw(process.life)


def _one(world: World) -> Process | None:
    found = world.living()
    return world.dice.choice(found) if found else None


async def _crash(world: World) -> None:
    process = _one(world)
    if process is not None:
        machine = process.machine
        world.crash(process)
        if world.dice.random() < 0.8 or not world.living():
            await asyncio.sleep(3 * world.dice.random())
            if not machine.is_detached:
                world.start(machine, world.dice.choice((0.0, 0.0, 2.5, -3 * DAY, 3 * DAY)))


async def _restart(world: World) -> None:
    machine = world.dice.choice(world.machines)
    for process in tuple(machine.processes):
        world.crash(process)
    await asyncio.sleep(world.dice.random())
    if not machine.is_detached:
        world.start(machine)


async def _cut(world: World) -> None:
    process = _one(world)
    if process is not None:
        world.note("cut", process.name)
        process.line.is_cut = True
        await asyncio.sleep(world.dice.choice((0.1, 2, 12, 45)))
        process.line.is_cut = False
        process.line.has_trouble(world.loop.elapsed)
        world.note("joined", process.name)


async def _freeze(world: World) -> None:
    process = _one(world)
    if process is not None and not process.life.is_frozen:
        world.note("freeze", process.name)
        process.life.is_frozen = True
        await asyncio.sleep(world.dice.choice((0.3, 3, 15, 45)))
        if process.life.is_frozen and not process.life.is_over:
            world.note("thaw", process.name)
            thaw(world, process)


async def _down(world: World) -> None:
    world.note("down")
    world.is_down = True
    await asyncio.sleep(world.dice.choice((0.2, 2, 8)))
    world.is_down = False
    world.db_trouble_at = world.loop.elapsed
    world.note("up")


async def _fail_over(world: World) -> None:
    world.fail_over(world.dice.choice((1, 2, 5, 20, 40)))


async def _die_unheard(world: World) -> None:
    """A failover, and the end of a process before it can have heard of it."""
    await _fail_over(world)
    await asyncio.sleep(world.dice.random() ** 2)
    if not world.is_healed:
        await _crash(world)


async def _detach(world: World) -> None:
    machine = world.dice.choice(world.machines)
    if machine.is_detached:
        return
    for process in tuple(machine.processes):
        world.crash(process)
    world.note("detach", machine.folder.name)
    machine.is_detached = True
    machine.folder.rename(machine.folder.with_suffix(".away"))
    await asyncio.sleep(world.dice.choice((1, 10, 40)))
    if machine.is_detached:
        attach(machine)
        world.start(machine)


async def _skew(world: World) -> None:
    process = _one(world)
    if process is not None:
        skew = world.dice.choice((0.0, 1.9, -5.0, 3 * DAY, -3 * DAY))
        world.note("skew", process.name, skew)
        process.clock.skew = skew


async def _limits(world: World) -> None:
    team = world.dice.choice(tuple(TEAMS))
    scope = world.dice.choice(_scopes(team))
    change_limits(world, scope, max(world.calls, 200))


def _scopes(team: str) -> tuple[str, ...]:
    """Return the scopes of a team that have limits; the first team has some for one of its models, the second for end
    users and for a tag, too."""
    first, second, *_ = TEAMS
    of_model = (f"model:{team}/m",) * (team == first)
    of_values = (f"user:{team}/0", f"user:{team}/1", f"tag:{team}/k=1") * (team == second)
    return (f"team:{team}", *(f"key:{key}" for key in TEAMS[team]), *of_model, *of_values)


async def _correct(world: World) -> None:
    team = world.dice.choice(tuple(TEAMS))
    scopes = [f"team:{team}", *(f"key:{key}" for key in TEAMS[team][: world.dice.randrange(2)])]
    day = day_text(int(world.now // DAY) - world.dice.randrange(2))
    tokens, nanousd = world.dice.randint(-3000, 3000), world.dice.randint(-30_000, 30_000)
    world.run("admin", "correct", lambda model, _: model.correct(scopes, day, tokens, nanousd))


async def _leave(world: World) -> None:
    process = _one(world)
    if process is not None and process.has_begun and not process.is_leaving and len(process.machine.processes) > 1:
        world.note("leave", process.name)
        world.loop.create_task(process.leave(), context=process.context)


async def _close_day(world: World) -> None:
    day = day_text(int(world.now // DAY) - 1)
    if world.now % DAY > 20:
        world.run("admin", "close_day", lambda model, _: model.close_day(day))
