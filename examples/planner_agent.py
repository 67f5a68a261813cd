"""An agent with several conversations per episode: a planner, and two solvers at the same time.

    burnish train guess --agent examples/planner_agent.py:run --set objective.advantage=group_mean

The planner hears whether the number is in the upper half; the solver only reads the planner's text.
"""

import asyncio


async def ask(client, messages):
    """Send a conversation; return it with the answer, and the answer's text."""
    reply = await client.chat.completions.create(model="policy", messages=messages)
    message = reply.choices[0].message
    return [*messages, message], message.content or ""


async def run(client, row):
    """Half a point for each digit that a solver guesses right, and more if the planner repeats
    both of them."""
    secret = f"{row['secret']:02d}"
    half = "higher" if row["secret"] > 31 else "lower"
    plan, text = await ask(client, [{"role": "user", "content": half}])
    solvers = [
        ask(client, [{"role": "user", "content": f"{text}, digit {place}"}]) for place in (1, 2)
    ]
    digits = [said.strip()[:1] for _, said in await asyncio.gather(*solvers)]
    right = sum(one == two for one, two in zip(digits, secret, strict=True))
    _, checked = await ask(client, [*plan, {"role": "user", "content": "".join(digits)}])
    return {"reward": 0.5 * right + 0.1 * (checked.strip() == secret), "digits": right}
