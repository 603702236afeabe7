// In the search, guides come before the pages of the API, unless the query looks like a name in a program.
const query = new URLSearchParams(window.location.search).get("q") || "";
const isName = /[_.(]|[a-z][A-Z]/.test(query);
const isGuide = (page) => /^(how-to|explanation|tutorial|choose)/.test(page);

var Scorer = {
    score: ([page, , , , score]) => score + (isGuide(page) && !isName ? 20 : 0),
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
