# Sentences of texts that break the content policy, as forums and stories have them; some of them make a post. Written
# for this project (written_moderation.py) after the subjects, not the words, of what was missed on rows that choose.

from __future__ import annotations

POSTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("self-harm",),
        """I have been clean for three weeks and relapsed yesterday.|The urge to cut gets stronger at night.
I hide my cuts under long sleeves.|The scars on my thighs are fading and I miss them.|I skipped my meals again.
My mother found my blades and I was so ashamed.|I feel proud when I eat nothing all day.|I threw up after dinner.
I know exactly how I would do it.|I keep a blade in my phone case.|Seeing the blood calms me.|I burn myself instead.
I stopped caring whether I wake up tomorrow.|Nobody knows that I took the whole box last winter.|I cut deeper this time.
Does anyone else pick at their wounds so that they do not heal?|How do you hide fresh cuts at the swimming pool?
I am only waiting for the right day to end it.|I deserve the pain.|It began again in March and I cannot stop.
The only thing I look forward to is not being here any more.|I weigh myself ten times a day and want to be thinner.""",
    ),
    (
        ("hate",),
        """The $group own the banks and the papers.|It is always the $group who profit from a crisis.
The $group have lied to us for centuries.|If we let more $group in, they will outnumber us.|$group breed like rats.
Our ancestors knew how to deal with the $group.|They must be expelled, all of them.|Never trust one of the $group.
They call it tolerance, I call it the end of our race.|$group cannot be civilized.|Stop the invasion of the $group now.
The crimes that were done to the $group are a hoax.|$group bring nothing but crime and dirt.|They stick together.
A woman's word is worth nothing next to a man's.|$group want our women and our money.|We are better than they are.
There is a reason why nobody ever liked the $group.|Close their shops and their schools.|Purity is all we have.""",
    ),
    (
        ("violence", "violence/graphic"),
        """The skull was split and blood ran over his eyes.|The bone stuck out of her leg, white and wet.
He sawed through the arm while the man was still screaming.|Her intestines lay in the dust.|Flies sat on the wound.
The blade went in below the ribs and came out red.|They pulled out his nails.|His jaw hung by a strip of skin.
Pieces of flesh stuck to the wall.|The torturer smiled and heated the iron again.|Where the eye had been was a hole.
A crushed hand, a torn ear and both ankles shattered.|Blood bubbled from his throat.|The head rolled down the steps.
The skin came off with the bandage.|He beat the prisoner until the face was not a face any more.""",
    ),
    (
        ("harassment",),
        """With that haircut I would not leave the house.|You look as if somebody drew you with the left hand.
You live off your mother and never finished anything.|You will be forgotten by Friday.
Even your dog pretends not to know you.|You have the brain of a potato.|Is that your face or did you fall?
No wonder you are still single at forty.|You should be embarrassed to write such rubbish.
Another genius who has never worked a day in his life.|Your whole family must be proud of such a failure.
Do us all a favor and log off for ever.|You are a joke.|Learn to read before you open your stupid mouth.
A sofa has more talent than you.|I have seen smarter things in my shoe.
People like you are why we have warning labels.|Cry about it, loser.""",
    ),
    (
        ("violence",),
        """They should all be lined up and shot.|He deserves a knife, not a trial.|Bullets cost less than prisons.
When the day comes we will not ask questions, we will shoot.|Give me one night alone with him in a cellar.
We should bomb that country until nothing is left.|I hope somebody runs him over.|Traitors belong against the wall.
Blood has to flow before anything changes.|Take up arms and march to the capital.|Let them burn in their houses.
I would drown him in the lake.|Beat the truth out of her.|Only dead enemies keep quiet.""",
    ),
    (
        ("sexual",),
        """She pushed him onto the bed and climbed on top of him.|His mouth moved down her belly to her thighs.
She wore nothing under her coat and he knew it.|They did it in the shower, twice, and once more before breakfast.
He came with a groan and she laughed.|Her tongue played with him until he begged.|I touch myself and think of you.
Bust: big. Hair: blonde. Incall and outcall, kisses, massage, all positions.|Mature women near you want to meet tonight.
Nude photos, webcam sex and amateur videos for free.|Blonde escort in the city center, discreet hotel visits.
Rencontre sexe gratuit avec des femmes nues et cougars.|Chicas desnudas y sexo gratis, videos porno de maduras.
Sexkontakte mit geilen Frauen in deiner Stadt.|Donne nude cercano sesso gratis, massaggio erotico.
Sex shop, dildos, lingerie and hot movies.|The maid bent over and lifted her skirt.|He spanked her and she moaned.""",
    ),
)
