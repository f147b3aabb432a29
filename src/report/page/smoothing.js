// Smoothed curves.
//
// [Note: smoothing] The smoothed value at step s is the mean of all values up to s, each with the weight
// exp(-d / N) if it is d steps back: an exponential average over N steps. The weights are divided by their
// sum, so that the first values are not drawn towards zero (bias correction), and they go by steps, so
// that a log which has only every tenth step is smoothed alike. Values that are nan or infinite have no
// weight and leave a gap.
//
// A curve that was thinned out has the extremes of its stretches, whose average means nothing. Such a curve
// brings the means of its stretches, and how many values each of them stands for: these are averaged.

const AMOUNTS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000];

// Amounts that make sense for so many steps: no smoothing, and up to a quarter of them.
const amountsFor = (numSteps) => AMOUNTS.filter((amount) => amount === 0 || 4 * amount <= numSteps);

// Enough to see a trend, little enough to see what happens: a fortieth of the steps.
const usualAmount = (numSteps) => amountsFor(numSteps).filter((amount) => 40 * amount <= numSteps).at(-1);

// Steps and values of the smoothed curve; null where it has a gap. Null for a curve that needs no second line.
function smoothed(curve, amount) {
  const source = curve.mean || curve;
  if (!amount) return curve.mean || null;
  let average = 0;
  let weight = 0;
  let last = source.steps[0];
  const values = source.values.map((value, i) => {
    if (!isPlain(value)) return null;
    const counted = source.counts ? source.counts[i] : 1;
    weight = weight * Math.exp((last - source.steps[i]) / amount) + counted;
    average += (value - average) * (counted / weight);
    last = source.steps[i];
    return average;
  });
  return { steps: source.steps, values };
}
