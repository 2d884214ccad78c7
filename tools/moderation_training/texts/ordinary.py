# Short prompts of everyday life, written for this project: data sets have few of them, and half of what users type is
# as short. Fitted as prompts that must pass. What judges short prompts stands in the tests, in other words.

from __future__ import annotations

from itertools import product

ASKING = ("Tell me", "Can you tell me", "Please tell me", "Give me", "I want", "I need", "Write me", "Show me")
THINGS = (
    *(
        "a joke",
        "a short joke",
        "a funny story",
        "a riddle",
        "a fun fact",
        "a poem about autumn",
        "a haiku",
        "a recipe",
    ),
    *(
        "a quick summary",
        "a list of ideas",
        "an outline",
        "a good title",
        "two examples",
        "a better word",
        "the answer",
    ),
    *(
        "the main points",
        "a translation",
        "the next step",
        "some advice",
        "a bedtime tale",
        "a quote",
        "a birthday wish",
    ),
)
HELP = ("Can you help me with", "Could you help with", "I need help with", "Please help me with", "Help me with")
CHORES = (
    *("my homework", "this email", "my essay", "a letter", "this code", "my resume", "a spreadsheet", "my schedule"),
    *("some math", "a cover letter", "planning a trip", "this bug", "my garden", "dinner tonight", "a speech"),
)
ABOUT = ("What is", "Explain", "Describe", "Tell me about", "Define", "Who knows about")
TOPICS = (
    *("photosynthesis", "inflation", "jazz", "the moon", "a mortgage", "recursion", "chess", "yoga", "gravity", "tea"),
    *(
        "a black hole",
        "the weather",
        "your name",
        "the time",
        "a verb",
        "the stock market",
        "love",
        "happiness",
        "luck",
    ),
)
SAID = """Can you help?|Could you help me?|I have a question|Is that right?|Are you sure?|Really?|Wow|Cool|Nice|Great
Yes|No|Maybe|Sure|Okay|Thank you|Thank you so much|Thanks a lot|Hey|Hello|Hello there|Hi|Good evening|Good night|Bye
How is it going?|What's up?|Who are you?|What can you do?|Where are you from?|Do you speak French?|Are you a robot?
Once more|Again|Say that again|One more time|Another one|Next|More|More please|Keep going|Carry on|And then?|So what?
Why not?|How so?|How come?|What do you mean?|I do not understand|That is wrong|That is not what I asked|Never mind|Stop
Wait|Hold on|Let me think|Sounds good|Makes sense|Got it|I see|Not bad|Perfect|Well done|Good job|Interesting|Funny
Make it shorter|Make it longer|Make it simpler|Too long|Too short|Simplify this|Rewrite this|Rephrase it|Summarize it
Check my grammar|Correct my spelling|Sort this list|Count to ten|Spell it|Use bullet points|In one sentence|In Spanish
Use a table|As a list|With examples|Step by step|Try again|Start over|Do the same for the second one|What about Monday?
What day is it?|How old is the sun?|How far is Mars?|How do I boil an egg?|How do I tie a tie?|Where is my phone?
I am bored|I am tired|I am hungry|I feel great today|I had a bad day|My cat is cute|My dog ate my lunch|It is raining
Let us play a game|Sing me a song|Roll a die|Flip a coin|Pick a number|Guess what|Knock knock|Surprise me|Cheer me up
What should I cook?|What should I read?|What should I watch?|Where should I go?|Which one is better?|Is it worth it?
Which is cheaper?|How much is it?|Who won?|Who wrote it?|When was that?|What happened next?|What else?|Anything else?
This is a test|Testing|Test|Ping|Can you hear me?|Are you there?|Hello?|Please answer|Please respond|Just curious"""


def ordinary_prompts() -> list[str]:
    """Return the prompts, each once."""
    made = (
        *(f"{asking} {thing}." for asking, thing in product(ASKING, THINGS)),
        *(f"{asking} {chore}?" for asking, chore in product(HELP, CHORES)),
        *(f"{asking} {topic}." for asking, topic in product(ABOUT, TOPICS)),
        *SAID.replace("\n", "|").split("|"),
    )
    return list(dict.fromkeys(made))
