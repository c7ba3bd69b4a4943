"""Training text of the built-in tokenizer: plain prose, then frequent words."""

_PROSE = """
The old ferry left the harbour at seven in the morning with a dozen people on board. It was the
first day of the year on which the river had been free of ice, and most of them had come only to
see the water. A woman who had been born in the town told the others that her father had built the
bridge, that her mother was the first teacher of the school, and that both of them were buried on
the hill. "What was his name?" asked a young man. She said that he had been known as the Engineer,
and that nobody had called him anything else for thirty years.

In 1931 the company moved its office to the capital. It had been founded by two brothers from the
north, who made clocks, and later radios; by the end of the war it was one of the largest in the
country. The older brother became a member of the government. The younger one, who had never liked
the city, went back to the village where he was born and wrote a book about birds. It was published
in 1948, and it is still in print. There is a street in the south of the city that has their name.

"Hi! Are you coming to the party on Friday?" "I don't know yet. I have to work until six. When does
it start?" "At eight, I think. Tom and Anna will be there, and they're bringing the music." "OK,
I'll try. Do you need anything from the shop?" "No, thanks. Just come!" "See you then." "See you!"

The police said on Monday that nobody had been hurt. According to the report, which was made public
a week later, the driver had not seen the lights because of the snow. The president of the railway
told the news agency that there would be new signals at every station by the end of the next year,
and that the price of a ticket would not change. The families of those on board were not satisfied
with that. They said that they would go to court, and that it was not about money.

Which of the two rivers is longer, the one in the east or the one in the west? The one in the west
is longer by more than a hundred miles, but the other has more water. Both of them come from the
same mountains, near the border between the two countries, and both were used to carry wood, stone
and corn to the sea before there were roads. The film about them was directed by a man from the
United States and won a prize at a festival in Germany; an American actress played the main role.

A good plan is short. It says what will be done, who will do it, when it should be finished and how
anybody can see that it is. If you can't say it in a few words then you don't understand it, and if
you don't understand it you can't explain it to the people who will have to do the work. So start
with the question that you want to answer. Most people start with the answer that they already
have, and that's why so many of their ideas turn out to be wrong.
"""

_WORDS = """
the of and to in a is that for it was on with as he be at by i this had not are but from or have an
they which one you were all her she there would their we him been has when who will no more if out
so up said what its about than into them can only other time new some could these two may first
then do any like my now over such our man me even most made after also did many off before must
well back through years much where your way down should because long each just state those people
too mr how little good world make very year still see own work men day get here old life both
between being under three never know same last another while us might great go come since against
right came take used himself few house use place during without again home around small however
found mrs part school thought went say general once upon war every don't does got united left number
course until always away something fact water though less public put think almost hand enough far
took head yet better set told nothing night end why didn't called eyes find going look asked later
knew point next city business group give toward young let room side social present several given
order national second possible rather face per among form important often things looked early white
case large big need four within felt along children saw best church ever least power development
light thing seemed family interest want members mind country area others turned although done open
god service certain kind began different door thus help means sense whole matter perhaps itself
times law human line above name example action company hands local show history whether five gave
either today act feet across quite taken past anything seen having death experience body half
really week words word car field information already themselves tell college money period shall
period together keep held sure free real air probably years cannot miss question behind making
brought study special ago became available heard reason major problem federal street am political
boy society age moment full result six voice court clear ground feel position change century girl
idea hours months john true center felt community art alone level party ten sound making table
south north west east road land black red green blue brown yellow winter summer spring autumn
river lake sea island mountain hill forest valley coast harbour bridge town village capital region
province county district border population language empire kingdom king queen prince princess duke
count emperor president minister governor mayor senator general captain officer soldier army navy
battle peace treaty born died married buried father mother son daughter brother sister husband wife
child uncle aunt cousin grandfather grandmother parents friend friends actor actress director
producer writer author poet singer musician composer artist painter architect engineer scientist
doctor teacher student professor lawyer judge politician footballer player coach team club league
season game match cup goal score champion championship won win lost lose played play plays film
films movie series television show album song songs band record records released release label
single music opera theatre novel book books story stories magazine newspaper published written
wrote directed starring produced based featured role roles character award awards prize nominated
university institute academy library museum hospital station railway airport company corporation
founded established built opened closed located moved named known called original later former
american british english french german italian spanish russian chinese japanese indian australian
canadian european african irish scottish polish swedish dutch jewish christian catholic roman greek
england france germany italy spain russia china japan india australia canada europe africa ireland
scotland poland sweden america washington london paris york california texas january february march
april may june july august september october november december monday tuesday wednesday thursday
friday saturday sunday morning afternoon evening tonight tomorrow yesterday minute minutes hour
weeks month birthday party dinner lunch breakfast coffee tea beer wine pizza cake bread cheese meat
fish fruit apple sugar salt food eat drink cook buy sell shop store market price cost pay paid cheap
money dollar dollars million billion thousand hundred percent tax bank job boss office meeting
phone call message email internet computer software program code data system network machine
computer science technology research theory model method process result results test paper report
news article reporter police officials government congress senate house vote election campaign
republican democrat democratic party leader leaders policy security military attack attacks killed
injured arrested charged trial prison crime gun weapon fire accident crash victim victims family
health medical patient patients disease drug drugs cancer treatment care risk study researchers
climate weather storm rain snow wind sun moon star stars earth sky energy oil gas coal power plant
animal animals dog cat horse bird birds tree trees flower garden stone wood iron gold silver glass
car cars bus train plane ship boat truck driver drive drove travel trip hotel beach holiday ticket
love like hate hope wish want need know think feel believe understand remember forget learn teach
read write speak talk listen hear watch wait stay leave arrive return meet visit bring carry send
receive give take hold keep lose find open close start stop begin finish continue change grow build
break fix clean wash wear dress run walk sit stand lie sleep wake fly swim climb fall jump throw
catch push pull cut hit kick fight win help try ask answer agree explain decide choose plan prepare
happy sad angry sorry afraid tired sick busy ready sure late early easy hard difficult simple
beautiful nice pretty ugly clean dirty hot cold warm cool dry wet heavy light dark bright loud quiet
fast slow strong weak rich poor safe dangerous popular famous successful common similar different
single main final recent current previous total average special particular local foreign private
ok okay yeah yes no hi hey hello bye thanks thank please lol haha maybe really totally actually
probably definitely anyway gonna wanna it's i'm i'll i've you're he's she's that's there's what's
let's can't won't isn't wasn't doesn't couldn't wouldn't shouldn't haven't hasn't they're we're
startup startups founder founders investor investors company companies programmer programmers
hacker hackers lisp essay essays ideas problem problems users product products customers
passage dialogue summary question reply answer short facts chunk token context
ness ment tion sion able ible ical ally ious ance ence ship hood ward wise less ful ing ers ed est
un re dis pre mis over under inter trans super anti non semi sub mid fore out up down
0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 50 100 200 500
1000 1800 1850 1900 1910 1920 1930 1940 1945 1950 1960 1970 1980 1990 1995 2000 2005 2010 2015 2020
"""


def _lines() -> list[str]:
    words = _WORDS.split()
    capitals = [word.capitalize() for word in words if word.isalpha()]
    # Running text has a frequent word more often than a rare one; the list says it once.
    return [*([_PROSE] * 3), " " + " ".join(words), " " + " ".join(words), " " + " ".join(capitals)]


TEXT = "\n".join(_lines())
