"""The game of the recipe ``guess`` as an agent, written only with the package openai.

    burnish data guess
    burnish sft guess-sft
    burnish train guess --agent examples/guess_agent.py:run --set objective.advantage=group_mean

It makes the requests that it would make to a hosted model, and trains as the environment does with
the same advantage: the rewards of an agent belong to its whole episode, not to turns.
"""

ASK = "0 to 63?"


async def run(client, row):
    """Play one game; each guess costs 0.1, and the right one earns 1."""
    messages, reward, found = [{"role": "user", "content": ASK}], 0.0, False
    while not found and len(messages) < 24:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        text = (message.content or "").strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 3 else 64
        found = guess == row["secret"]
        reward += float(found) - 0.1
        hint = ASK if guess >= 64 else "higher" if row["secret"] > guess else "lower"
        messages += [message, {"role": "user", "content": hint}]
    return {"reward": reward, "guesses": len(messages) // 2, "correct": float(found)}
