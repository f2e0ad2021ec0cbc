"""Short texts in the public domain, for measurements that need some and were given none.

Models have read them often and predict them well; what is measured on them flatters a little. Texts to
calibrate with are others than those that are measured.
"""

from __future__ import annotations

MEASURE = (
    # Lewis Carroll, Alice's Adventures in Wonderland, 1865
    """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, "and what is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and
stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking
the daisies, when suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear
the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it
occurred to her that she ought to have wondered at this, but at the time it all seemed quite natural); but
when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then hurried on,
Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit with
either a waistcoat-pocket, or a watch to take out of it.""",
    # Charles Darwin, On the Origin of Species, 1859
    """When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution
of the inhabitants of South America, and in the geological relations of the present to the past inhabitants
of that continent. These facts seemed to me to throw some light on the origin of species, that mystery of
mysteries, as it has been called by one of our greatest philosophers. On my return home, it occurred to me,
in 1837, that something might perhaps be made out on this question by patiently accumulating and reflecting
on all sorts of facts which could possibly have any bearing on it. After five years' work I allowed myself
to speculate on the subject, and drew up some short notes; these I enlarged in 1844 into a sketch of the
conclusions, which then seemed to me probable: from that period to the present day I have steadily pursued
the same object. I hope that I may be excused for entering on these personal details, as I give them to show
that I have not been hasty in coming to a decision.""",
    # Herman Melville, Moby-Dick, 1851
    """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse,
and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part
of the world. It is a way I have of driving off the spleen and regulating the circulation. Whenever I find
myself growing grim about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find
myself involuntarily pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and
especially whenever my hypos get such an upper hand of me, that it requires a strong moral principle to
prevent me from deliberately stepping into the street, and methodically knocking people's hats off, then, I
account it high time to get to sea as soon as I can. This is my substitute for pistol and ball. With a
philosophical flourish Cato throws himself upon his sword; I quietly take to the ship. There is nothing
surprising in this. If they but knew it, almost all men in their degree, some time or other, cherish very
nearly the same feelings towards the ocean with me.""",
    # Euclid, Elements I.1, after Thomas Heath, 1908
    """On a given finite straight line to construct an equilateral triangle. Let AB be the given finite
straight line. Thus it is required to construct an equilateral triangle on the straight line AB. With centre
A and distance AB let the circle BCD be described; again, with centre B and distance BA let the circle ACE be
described; and from the point C, in which the circles cut one another, to the points A, B let the straight
lines CA, CB be joined. Now, since the point A is the centre of the circle CDB, AC is equal to AB. Again,
since the point B is the centre of the circle CAE, BC is equal to BA. But CA was also proved equal to AB;
therefore each of the straight lines CA, CB is equal to AB. And things which are equal to the same thing are
also equal to one another; therefore CA is also equal to CB. Therefore the three straight lines CA, AB, BC
are equal to one another. Therefore the triangle ABC is equilateral; and it has been constructed on the given
finite straight line AB. Being what it was required to do.""",
)

CALIBRATE = (
    # Abraham Lincoln, Gettysburg Address, 1863
    """Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in
Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil
war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on
a great battle-field of that war. We have come to dedicate a portion of that field, as a final resting place
for those who here gave their lives that that nation might live. It is altogether fitting and proper that we
should do this. But, in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this
ground. The brave men, living and dead, who struggled here, have consecrated it, far above our poor power to
add or detract. The world will little note, nor long remember what we say here, but it can never forget what
they did here.""",
    # Jane Austen, Pride and Prejudice, 1813
    """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in
want of a wife. However little known the feelings or views of such a man may be on his first entering a
neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as
the rightful property of some one or other of their daughters. "My dear Mr. Bennet," said his lady to him one
day, "have you heard that Netherfield Park is let at last?" Mr. Bennet replied that he had not. "But it is,"
returned she; "for Mrs. Long has just been here, and she told me all about it." Mr. Bennet made no answer.
"Do not you want to know who has taken it?" cried his wife impatiently. "You want to tell me, and I have no
objection to hearing it." This was invitation enough.""",
    # a recipe and a table, so that not all is prose
    """To make bread, take 500 g of flour, 10 g of salt, 7 g of yeast and 300 ml of warm water.
1. Mix flour and salt in a large bowl; stir the yeast into the water and pour it in.
2. Knead for 10 minutes, until the dough is smooth, and let it rest for 90 minutes under a damp cloth.
3. Shape a loaf, wait another 40 minutes, and bake it at 230 degrees for 35 minutes.

year,month,rain_mm,sun_hours
1901,1,83,41
1901,2,61,72
1901,3,70,108
def area(width: float, height: float) -> float:
    return width * height""",
)
