"""The texts that the demo reads: sixty, on six topics, written for it, from two words to about two hundred tokens long."""

_TEXT = """
The kettle whistled.
Two eggs, please.
Bread needs flour, water, salt and time.
Salt the water before the pasta goes in, and keep a cup of it for the sauce.
Knead the dough until it is smooth, cover it with a cloth and let it rise in a warm corner for an hour.
A soup made of yesterday's vegetables tastes best on a cold evening.
Ripe tomatoes want little more than olive oil, basil and a pinch of salt.
To bake a loaf with a crust that crackles, heat the oven with a heavy iron pot inside it for at least half an hour.
  Meanwhile turn the risen dough out of its basket onto a sheet of paper, cut a long line into its top with a sharp
  blade, and lower it into the pot. Put the lid on, so that the steam that the dough gives off stays close to it: the
  surface remains soft, the loaf can spread, and the cut opens like a flower. After twenty minutes take the lid off and
  let the crust dry and brown for as long again. It is done when it sounds hollow as you knock on its base. Then comes
  the hardest part, which is to leave the bread alone on a rack until it has cooled, because the crumb is still setting
  while the loaf is hot, and a slice cut too early is gummy and tears.
Grandmother measured sugar with a chipped blue cup and never wrote a recipe down.
The stew simmered for three hours until the beef fell apart at the touch of a spoon.
Jupiter has many moons.
The comet returns every seventy-six years.
Saturn's rings are made of ice and rock, most pieces no larger than a house.
A telescope gathers light; the wider its mirror, the fainter the stars it can show.
On a night without a moon and far from the city lights you can see the Milky Way as a pale band across the sky.
The probe sent back its first pictures of the frozen plains after a flight of nine years.
Mars looks red because the iron in its dust has rusted.
When a star much heavier than the sun has burned the last of its fuel, nothing holds its core up against its own weight
  any longer. In less than a second the core falls in on itself, and the layers around it, suddenly without a floor,
  fall after it and bounce. The bounce becomes an explosion that for some weeks can outshine the whole galaxy in which
  the star lived. What flies outward carries the heavy elements that the star made in its long life, together with
  others that were forged only in the blast, and from such ashes new stars and planets are made. What stays behind is
  small and strange: either a neutron star, a ball as wide as a town in which a spoonful of matter weighs as much as a
  mountain, or, if there was too much mass even for that, a black hole, from which not even light can leave.
Astronauts exercise for two hours a day, since muscles waste away without weight.
The moon passed in front of the sun, and for two minutes the eclipse turned day into night.
It is snowing again.
Thunder follows lightning.
Heavy rain is expected in the valley tonight, with floods along the river.
The wind turned to the north and the temperature fell by ten degrees within the hour.
Fog lay over the harbour all morning, and the ferries waited at the pier with their horns sounding.
After weeks of drought the farmers looked up at every cloud.
A barometer that falls quickly promises a storm.
Clouds form when warm air that carries moisture rises, cools, and can no longer hold all of its water as vapour. Tiny
  drops gather around specks of dust, salt or smoke, each so light that the slightest movement of the air keeps it from
  falling. As long as the air goes on rising the cloud grows, and on a hot afternoon it may tower up until its top
  freezes and spreads out like an anvil. Inside such a tower drops and grains of ice are carried up and down, collide,
  and part with electric charge, until the tension between one region and another, or between the cloud and the ground,
  becomes too great and a flash of lightning evens it out. At last the drops and the hailstones are too heavy for the
  wind below them, and they fall; the cool air that they drag along reaches the ground first, which is the gust that
  every walker knows as the last warning to look for a roof.
Hail as large as cherries broke the panes of the greenhouse.
The forecast says sunshine for the whole weekend, with a light breeze from the sea.
He plays the cello.
She sang without a microphone.
The orchestra tuned to the oboe's long and steady note.
A string that is half as long sounds an octave higher.
The drummer kept a slow beat while the trumpet wandered off into a solo that nobody had planned.
Learning the cello takes patience: first the bow arm, then the left hand, then both of them slowly together.
The choir rehearses on Thursdays in the old church, because its vault makes every chord hang in the air.
A violin begins as two thin plates of wood, spruce for the belly and maple for the back, which the maker carves by hand
  until they ring when they are tapped. The arching of the plates, their thickness from the middle to the edge, and even
  the varnish decide what the instrument will sound like, and no two pieces of wood are alike, so the maker listens and
  scrapes and listens again. A small post stands upright inside the body and carries the trembling of the bridge from
  the front to the back; players call it the soul of the violin, and moving it by the width of a hair can make a dull
  instrument speak. Then come the neck, the pegs, the four strings and the bow. It is said that a violin has to be
  played for years until it finds its voice, and that one which lies in a case for too long falls asleep and must be
  woken up with patience.
The band's third album was recorded in a barn within a single week.
Jazz musicians improvise over the chords of a song that everybody on the stage knows.
The goalkeeper slipped.
We lost on penalties.
She ran the marathon in under three hours, eleven minutes faster than last year.
The referee blew the whistle and pointed to the penalty spot.
A good serve in tennis starts with the toss, not with the arm.
The cyclists crossed the last mountain pass together before the sprint to the finish decided the race.
He trains every morning in the pool before the school opens.
The final began nervously, with both teams afraid of the first mistake, and for an hour the ball was hardly ever near a
  goal. Then the coach of the visitors sent on a striker of nineteen who had not played since the autumn, and with her
  the match changed. She chased every pass that the defenders thought was lost, and in the seventieth minute she stole
  the ball on the left wing, ran past two players and shot low into the far corner. From then on the home team threw
  everybody forward. They hit the post, they hit the bar, they had a goal taken away because a shoulder was offside, and
  in the last minute of added time their captain rose above the crowd in front of the goal and headed the ball into the
  net. In extra time the legs were heavy and the passes short; it was the young striker again who scored, and this time
  there was no answer.
The climbers turned back two hundred metres below the summit because the weather was closing in.
Basketball rewards height, but the quickest player on the court is often the smallest.
The compiler found an error.
Restart the server.
The database lost its connection while the backup was running.
A cache keeps what was asked for recently close at hand, so that asking again is quick.
The programmer fixed the bug by changing a single character, after two days of looking for it.
Encryption turns a message into noise for everybody who does not hold the key.
The new laptop starts in four seconds, but its battery hardly lasts until noon.
A graphics processor is built of many small multiprocessors that each run thousands of threads, a few at a time, and
  switch between them whenever one has to wait. Its arithmetic units can do far more work in a second than its memory
  can feed them, and so the art of programming it is mostly the art of moving data less. What has once been fetched from
  the large and distant memory should be kept in the small and near one until everybody who needs it has used it;
  results that are wanted only for a moment should never be written out at all; and while the units are busy with one
  block of numbers, the next should already be on its way. A program that follows these rules can be ten times as fast
  as one that does the same sums in the order in which the textbook writes them down, although not a single
  multiplication has been saved.
Unit tests are worth most on the day when someone changes code that they did not write.
The website was slow because every page asked the database the same question a hundred times.
"""

TEXTS: tuple[str, ...] = tuple(_TEXT.strip().replace("\n  ", " ").splitlines())
"""The lines of `_TEXT`. An indented line there continues the one above."""
