# Texts to moderate, written for this project: insults, threats, hate, intimacy and self-harm in plain words, without
# slurs; and texts that speak of such things as news, medicine, law, history, advice, sport and stories do.
# The public sets have few of the short ones that users write to each other. Each is made of parts by fixed dice.

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.moderation_training.texts.written_posts import POSTS

SEED = 20266
EACH = 90  # texts of a kind that breaks the policy, and as many longer ones
SPOKEN_OF = 4  # texts of each subject that keeps it

# What breaks the policy: the kinds it is of, openings and endings.
INSULTS = """You are $bad|You're $bad|What $bad you are|Shut up, you $noun|Nobody likes you, you $noun
God, you are $bad|Look at this $noun|You $noun, you cannot even spell|I have never met such a $noun
Go away, you $noun|Everybody at school laughs about you because you are $bad
Your mother must be ashamed of $bad like you|Only $bad would write something like that|Listen, you $noun
You are nothing but $bad|lol what a $noun|You should be ashamed of yourself, $noun|Delete your account, you $noun
People like you make me sick, you $noun"""
BAD = """an idiot|a complete moron|a worthless piece of trash|a stupid loser|a disgusting pig|a pathetic liar
an ugly cow|a dumb fool|a useless waste of space|a brainless clown|a miserable coward|a fat slob|a filthy rat"""
NOUNS = """idiot|moron|loser|piece of trash|stupid pig|pathetic liar|fool|clown|dumb cow|coward|freak|creep
imbecile|waste of air|scumbag|jerk|dirtbag"""
INSULTED = """Nobody wants you here.|Everyone hates you.|You make me sick.|Get lost.|Crawl back into your hole.|LOL
I hope you fail at everything.|You will never have friends.|No wonder that she left you.|You disgust me.|Just quit."""

THREATS = """I will kill you|I'm going to kill you|I will break your legs|I am going to beat you up
I'll cut your throat|I'm coming to your house with a gun|You are dead|I will make you bleed
We will find you and hurt you|I swear I will smash your face in|I will shoot you|I'll stab you
I will burn your house down with you inside|One day I will strangle you|You will not survive this night
I know where you live and I will come with a knife|I'll put a bullet in your head
We are going to beat you until you stop moving|Say your prayers, you die tomorrow"""
THREATENED = """, you $noun|, idiot|, I promise|. Watch your back|. You have been warned|. This is no joke
 if you come here again|, and nobody will miss you|. You will pay for this| when I see you|, and your family too||!"""

GROUPS = """immigrants|Muslims|Jews|Christians|Hindus|women|gay people|black people|white people|Asians|Mexicans
Arabs|refugees|disabled people|foreigners|trans people|gypsies|Africans|Indians|Chinese people"""
HATE = """All $group are vermin|$group are parasites|$group are subhuman|I hate all $group
$group are filthy animals|$group are stupid by nature and always will be|$group ruin everything they touch
We must get rid of the $group|$group are a disease of this country|$group do not deserve rights
Send all $group back where they belong|$group are thieves and liars, every one of them
No decent person wants $group as neighbors|$group smell|Do not hire $group, they are lazy|$group are inferior to us
Keep our country clean of $group|The problem with this country is that there are too many $group
$group belong in the kitchen, not in an office"""
HATE_THREATS = """All $group should be shot|$group deserve to die|Kill all $group|Hang the $group
$group should be exterminated|We should burn down the houses of $group|Gas the $group|Time to hunt $group
Somebody should bomb the $group|I want to see every one of the $group dead|Beat up all $group that you meet"""

SELF_HARM = """I want to kill myself|I am going to end my life tonight|I cut my arms again|I want to die
I have the pills and will take all of them|I cannot go on, I will jump from the bridge
I hate myself and cut my legs|I wrote my goodbye letter and tonight I will do it|I will hang myself
I starve myself because I deserve it|Cutting is the only thing that makes me feel better
I tried to kill myself last week and will try again|I burn my skin when I feel empty|I do not want to live any more
I am thinking about suicide every day|Everyone would be better off if I killed myself
I bought a rope to hang myself|I wish I was dead|I'm suicidal"""
SAD = """ and nobody would notice|. Goodbye|, I just feel empty|. Please do not tell my parents
, I am so tired of it||.| because I hate myself|, it is all too much| as soon as I am alone|. Nothing helps"""

VIOLENCE = """Somebody should shoot the $who|The $who deserves a bullet|I hope the $who gets beaten to death
Let us burn down the house of the $who|We should hang the $who|Kill the $who|I would love to watch the $who bleed
The only good $who is a dead one|I am going to shoot up the place where the $who works|Bomb the office of the $who
We will take our guns and pay the $who a visit|Death to the $who|Smash the head of the $who"""
WHO = """president|mayor|judge|teacher|landlord|journalist|minister|boss|referee|police officer|senator|manager"""

SEXUAL = """She took off her clothes and he kissed her breasts|He slid his hand between her thighs and she moaned
I want you naked in my bed tonight|We had sex on the kitchen table all night|Hot singles want sex in your town
Sexy escorts for wild nights, call now|She sat on his lap without underwear and moaned with pleasure
Watch naked women live on cam|I get so hard when I think of your body
He undressed her and they made love until dawn|Horny housewives want to meet you
Tell me what you would do to me in bed, I am so wet|XXX videos of hot couples
Erotic massage with a happy end, discreet|She begged him to take her right there|I want to lick you all over
Free porn, thousands of videos|Her nipples were hard under the wet shirt and he could not stop touching her"""
LUST = """, slowly at first|. Call now| and came twice|, baby|. No limits|. So good|| again and again|. 18+ only"""


# What keeps it, by subject.
KEEPS = (
    # news and law
    """Police arrested a man who is accused of killing his neighbor.|Three people were injured in a shooting on Monday.
The court sentenced him to ten years in prison for rape.|A bomb from the war was found and removed in Dresden.
The minister condemned the attack on a mosque and called for calm.|Two soldiers died when their car hit a mine.
The jury found her guilty of murder in the second degree.|Prosecutors charged the former coach with sexual abuse.
A man threatened a clerk with a knife and fled with the cash.|Hate crimes rose by four percent last year.
The suspect shot at officers before he was overpowered.
The article describes how survivors of the massacre live today.
Whoever threatens another person with a crime is liable to a fine.
The victims' families demand a new investigation.""",
    # medicine and sexual health
    """A mammogram shows changes in the breast before they can be felt.|Wear a condom to be safe from infections.
The rash may appear on the penis or the vagina a week after the infection.|Pain during sex can have many causes.
The doctor examined the wound and stopped the bleeding.|Puberty begins earlier for girls than for boys.
An overdose of this drug can damage the liver; call a doctor at once.|Breastfeeding can hurt in the first weeks.
The patient was treated for cuts on both arms and could go home.|Ask your partner for consent before you have sex.
Erectile dysfunction is common in men over fifty and can be treated.
Most miscarriages happen in the first three months.|Which birth control pill suits me?
Is it normal that my period is late?|How is an abortion done in a hospital?""",
    # counsel about self-harm and grief
    """If you think about suicide, call a help line; someone will listen day and night.
My friend says that he wants to die. How can I help him?
My brother took his own life two years ago and I miss him every day.
She recovered from anorexia and now gives talks at schools.
Signs that a teenager hurts himself are long sleeves and secrets.
The help line for people in despair is free of charge.|Talking about suicide does not make it more likely.
I was depressed last year, but therapy helped me and I am well now.|How do schools prevent self-harm?
The book tells of a girl who stops cutting herself when she finds a friend.|I am sad today but it will pass.
My dog died and I cannot stop crying.|How do I tell a child that her grandfather died?|I feel tired and need rest.""",
    # history, religion, society, groups
    """Millions of Jews were murdered in the Holocaust.|The slaves were beaten and sold like cattle until 1865.
Women were not allowed to vote in Switzerland until 1971.|Muslims fast during Ramadan from dawn to sunset.
Immigrants founded half of the start-ups in the valley.
The study compares how black and white applicants are treated.|The king had his rivals beheaded.
In 1916 thousands of soldiers died in the trenches in one day.|Gay couples have been allowed to marry since 2015.
The museum shows how propaganda called people vermin.|Racism hurts all of us; here is how to speak up against it.
The Chinese New Year falls in February.|Many refugees learn the language within two years.
Christians and Hindus celebrated together in the village.|She writes about being a trans woman at work.
Disabled people need ramps, not pity.|I am a proud black woman.""",
    # quarrels and strong words that keep the rules
    """I hate Mondays.|This update is trash, my phone is dead again.|I could kill for a pizza.|My feet are killing me.
That exam murdered me.|I am dying of laughter.|What a stupid mistake I made.|You are wrong, and here is why.
I disagree with everything you wrote.|The referee was blind yesterday!|Shut the door, it is cold.
Damn, that was close.|The food was disgusting and the waiter rude.|I was such an idiot when I was young.
This film is the worst ever.|Stop calling me names, please.|He called me a loser and I reported him.
My boss yelled at me and I feel awful.|You look sick, go to bed.|That joke was sick!|Hell yeah, we won!
Holy crap, look at the size of that pumpkin.|The government's plan is stupid and will fail.
I am so angry with you that I cannot talk now.|You scared me to death.""",
    # sport and games
    """Our striker shot twice and killed the game.|The boxer knocked him out in the third round.|We got destroyed 5-0.
I need a better sword to kill the boss in level nine.|Headshot! My best round this week.
They slaughtered us in chess.|The zombies come at night, so build a wall and keep a gun.
He attacked on the last climb and nobody could follow.|The fight ended when the referee stepped in.
In this game you play an assassin in Venice.|The Bulls crushed the Heat.|Respawn and shoot them from the tower.
Our defense was murdered on the left side.|Use fire against the trolls.""",
    # people who tell of what was done to them, or of rules
    """Somebody called me a slur in the game and I reported him.|A moderator banned me because I quoted the insult.
It was not your fault; he should have asked for your consent.|Prostitution is legal here, but ads for it are not.
My cat ate a poisonous plant and the vet saved her.|That dog was put down after it bit a child.|I broke my leg skiing.
He lost his job after he posted a racist joke.|I was bullied at school and now I talk about it.|Is that abuse?
I wish I liked my body more.|I was drunk, I was sick, and my friends took me home.
The quote is from a speech that called for murder; it is printed here as a document of its time.
They were deported and half of them died on the way.|The colonists enslaved and plundered for three hundred years.
Boys are taught that they must not cry, and that is wrong.|I feel low today, but I will call a friend.
The law bans the sale of sex dolls that look like children.|The demonstrators say that the police beat them.""",
    # other languages
    """Der Zug nach Köln hat zehn Minuten Verspätung.|Meine Schwester und ihre Freundinnen backen einen Kuchen.
Die Frauen im Chor suchen noch zwei Männer.|Wie schreibt man einen Brief an das Finanzamt?|Frei nach dem alten Märchen.
Ich suche in deiner Stadt eine kleine Wohnung.|Kannst du diesen Absatz kürzer machen?|Bitte erkläre mir diese Formel.
Das Kind hat Fieber, was soll ich tun?|Les femmes de mon village chantent dans une chorale.|Il pleut depuis lundi.
Pouvez-vous corriger cette lettre, s'il vous plaît ?|Une rencontre avec des lecteurs aura lieu à la bibliothèque.
Le musée est gratuit le premier dimanche du mois.|Explique la Révolution française à un enfant.|Où est la gare ?
Las chicas del equipo ganaron el partido.|¿Puedes resumir este artículo en tres frases?
El vídeo de la boda dura una hora.|Necesito una receta de sopa con pollo.|Mi abuela vive cerca de la playa.
Traduce esta palabra al inglés.
Le donne della valle fanno un buon formaggio.|Vicino a casa mia c'è un parco.|Puoi spiegarmi questo esercizio?
Il treno parte alle otto.|As meninas da escola plantaram árvores.|Preciso de ajuda com o trabalho de casa.
De meisjes spelen voetbal in het park.|Kun je deze brief nakijken?|Ett kort brev till min mormor, tack.
Dzieci bawią się w ogrodzie.|Я учу английский язык.|Какая сегодня погода?
今日の夕食は何がいいですか。|我想学做面包。""",
    # stories
    """The knight drew his sword and struck the dragon until it lay still.|"I will find you," whispered the ghost.
He kissed her at the station and the train pulled out.|The detective looked at the body and lit a cigarette.
She slapped him and ran out into the rain.|The soldier bled from his leg but crawled on.
They fell asleep in each other's arms.|The villain laughed and pointed a gun at the captain.
He loved her, and she loved his brother.|The witch was burned in the square while the crowd looked on.
"You fool!" cried the old king.|The wolf ate the sheep.|She undressed, took a bath and went to bed early.
They danced close all night and said good-bye at dawn.""",
    # everyday words that such texts use as well
    """A black cat sat on the white wall.|The panda is black and white.|White wine goes with fish.
The black keys of a piano are made of ebony.|Call this number to book a table.|Wash the apple before you eat it.
Hot chocolate in bed on a Sunday!|Burn wood, not plastic.|I put on my pants and a belt.
She got wet in the rain and needed a towel.|He came home twice that night to look for his keys.
The old oak is the most mature tree in the park.|Our girls' team won the cup.
Big windows and blond wood make the room bright.|Touch the screen to begin.|Which planet is the hottest?
The bottom of the lake is dark.|Lick the stamp and put it on the letter.|The ball was kicked over the wall.
A hole in the roof lets the rain in.|Young men and women from the village sing in the choir.
The screw is tight, take the long one.|His head was full of songs.|Write the numbers one to ten in a random order.
The host showed us the bedroom with two beds.|Nuts and balls of dough.|It is hard to lift a wet mattress.
Strip the paint with hot water.|The bride kissed her father.|Fresh meat is sold here.""",
    # what is said around it: everyday words that break nothing
    """You are the best friend I ever had.|You're so kind, thank you.|I will call you tonight.|I will find you a seat.
I am going to help you move on Saturday.|I'm coming to your house with a cake.|You made my day.
All women in my family are doctors.|My neighbor is a journalist.|The judge asked for silence.
Immigrants and locals cook together on Fridays.|I want to sleep.|I want to see you at the party tonight.
She took off her coat and sat down.|Call now for a free quote.
I know where you live, I brought the mail last year.|I will never forget what you did for me.|I love my body.
Our massage chairs are on sale.|The teacher says you are talented.|Let us pay the mayor a visit and ask him.""",
)
# And what is no hate, of the same groups, and no violence against the same people.
OF_GROUPS = """Many $group live in this street|$group and their neighbors cooked together|My teachers were $group
The festival of the $group begins on Friday|$group have the same rights as everybody|Our club welcomes $group
The newspaper interviewed $group about their work|Some of my best friends are $group|How do $group see this?
$group are often treated unfairly when they look for a flat|I read a book on the history of $group
People who insult $group are fined|I love $group|$group are welcome here|$group are human beings as you and I
$group have dreams like everybody else|What do $group celebrate in spring?|Do not say that all $group lie"""
OF_PEOPLE = """The $who gave a speech at the school|I voted against the $who|The $who is wrong about the new road
Somebody should tell the $who|I disagree with the $who|The $who was attacked and is in hospital|Call the $who today
I am angry with the $who because the letter never came|The $who has to explain the bill|We thanked the $who"""
LEAD = "||||||Today I read this: |From a forum: |A reader writes: |Yesterday on the radio: |He said: "


def written_to_moderate() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each text with the kinds of the content policy that it breaks: none, if it keeps it."""
    dice = random.Random(SEED)

    def filled(text: str) -> str:
        for name, parts in (("$bad", BAD), ("$noun", NOUNS), ("$group", GROUPS), ("$who", WHO)):
            text = text.replace(name, dice.choice(_parts(parts)))
        return text[:1].upper() + text[1:]

    def pair(openings: str, endings: str, link: str = "") -> str:
        text = filled(dice.choice(_parts(openings)) + link + dice.choice(endings.replace("\n", "|").split("|")))
        return dice.choice((text, text, text.lower(), text.rstrip(".")))

    broken: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
        (INSULTS, INSULTED, ". ", ("harassment",)),
        (THREATS, THREATENED, "", ("harassment", "violence")),
        (HATE, "||.|!|. Everybody knows it|. Wake up", "", ("hate",)),
        (HATE_THREATS, "||.|!|. Who joins me?", "", ("hate", "hate/threatening", "violence")),
        (SELF_HARM, SAD, "", ("self-harm",)),
        (VIOLENCE, "||.|!|. I mean it| today", "", ("violence",)),
        (SEXUAL, LUST, "", ("sexual",)),
    )
    for openings, endings, link, kinds in broken:
        for text in dict.fromkeys(pair(openings, endings, link) for _ in range(EACH)):
            yield text, kinds
    for kinds, sentences in POSTS:
        for _ in range(EACH):
            yield filled(" ".join(dice.sample(_parts(sentences), dice.randint(1, 4)))), kinds
    for openings in (OF_GROUPS, OF_PEOPLE):
        for text in dict.fromkeys(pair(openings, "||.|!| today|, they said") for _ in range(EACH)):
            yield text, ()
    for subject in KEEPS:
        said = _parts(subject)
        yield from ((text, ()) for text in said)
        for _ in range(SPOKEN_OF * 5):
            yield dice.choice(LEAD.split("|")) + " ".join(dice.sample(said, dice.randint(2, 4))), ()


def _parts(text: str) -> list[str]:
    return text.replace("\n", "|").split("|")
