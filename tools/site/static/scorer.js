// Sphinx's search: of pages that match equally well, a how-to page comes first.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("docs/how-to/") ? score + 6 : score),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
