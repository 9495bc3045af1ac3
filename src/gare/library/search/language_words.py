"""Words by which a short query shows its language: small ones of its grammar, and things people search for.

Some are English words or names as well (`ALSO_ENGLISH`), or of many names (`NAME_WORDS`: Los Angeles,
Leonardo da Vinci). Those, and words of one or two letters, count half and never alone.
"""

from __future__ import annotations

LANGUAGE_NAMES = {
    "cs": "Czech",
    "da": "Danish or Norwegian",
    "de": "German",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "hu": "Hungarian",
    "id": "Indonesian or Malay",
    "it": "Italian",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "sv": "Swedish",
    "sw": "Swahili",
    "tl": "Filipino",
    "tr": "Turkish",
    "vi": "Vietnamese",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAME_WORDS = _words(
    """
    al da das de dei del della den der des di do dos du el et il la las le les los san van vom von y zu
    noël
    """
)

ALSO_ENGLISH = _words(
    """
    ada adam api apus assise aux azul balla baum berg blanche boom bos cal calcio cane canta
    casa che com con conduit copac dag dan dans danse das dia die din dit dom elle est foc fut
    grande gunung hal haus hopper hus ist jag jalan joga jour junge kar kis kleine kota las les
    mand mann marche mare mariage mer mesa moto musica nad nage naik natal niña niño noir non nos
    para pas per peste petit petite pies pod pula puno regen rent rio roja rote rouge rower
    rue saute singen sol sole sonne sous strand strom sub sur são tao til tuli ulang una und une
    uno uns van verde ville voda wald
    blanc kat meer mutter nero piccolo psa
    """
)

WORDS = {
    "cs": _words(
        """
        na ve ze se je jsou muž žena ženy pes psa kočka dítě děti dům moře hory sníh pláž město les strom
        voda řeka slunce noc vaří hraje běží skáče jede tančí zpívá sedí stojí dívka chlapec holka kluk lidé
        při pod nad mezi který která jak svatba narozeniny kolo kůň pták ryba oheň hudba fotbal červený
        modrý zelený
        """
    ),
    "da": _words(
        """
        og på en et med til af ikke der som er det mand kvinde hund kat børn hus bil strand bjerg sne skov
        træ vand flod nat dag pige dreng mennesker løber spiller hopper danser synger laver sidder står
        kører rød blå grøn fugl hest fisk bryllup fødselsdag cykel gade havet sejler jeg hun mellem under
        over jul
        """
    ),
    "de": _words(
        """
        der den des dem zum zur mein meine und die das ein eine einen einem einer mit auf im am ist sind
        nicht von zu bei für über unter ich wir mann frau hund hunde katze kinder haus meer strand berg
        berge schnee wald baum wasser fluss nacht mädchen junge leute menschen läuft spielt springt tanzt
        singt kocht sitzt steht fährt reitet schwimmt küche straße stadt himmel sonne sonnenuntergang
        geburtstag hochzeit fahrrad pferd vogel fisch feuer musik fußball rote roter rotes blaue blauer
        grüne grüner kleine kleiner große großer weiße schwarze spielen laufen tanzen kochen singen garten
        wiese kuchen kerzen regen urlaub weihnachten
        autorennen bruder feuerwehr mutter regenbogen schmetterling schwester vater wasserfall
        """
    ),
    "es": _words(
        """
        de del y el la mi tu un una unos unas los las con en por para que está están es muy su sus al sobre
        entre como hombre hombres mujer mujeres perro perros gato gatos niño niña niños niñas casa coche
        playa montaña montañas nieve bosque árbol agua río noche día chica chico gente corre corriendo juega
        jugando salta saltando baila bailando canta cantando cocina cocinando sentado sentada camina
        caminando nadando conduce comiendo ciudad calle cielo puesta cumpleaños boda bicicleta caballo
        pájaro pez fuego música fútbol rojo roja azul verde blanco blanca negro pequeño grande jardín lluvia
        navidad guitarra mesa
        bomberos concierto hermana hermano piscina
        """
    ),
    "fi": _words(
        """
        ja on ei se joka kun mies nainen koira kissa lapsi lapset talo meri ranta vuori lumi metsä puu vesi
        joki yö päivä tyttö poika ihmiset ihmisiä juoksee leikkii pelaa hyppää tanssii laulaa istuu seisoo
        ajaa kävelee uimassa ui keittiössä kadulla punainen sininen vihreä lintu hevonen kala häät
        syntymäpäivä pyörä tuli musiikki rannalla lumessa metsässä joulu pieni iso
        """
    ),
    "fr": _words(
        """
        de le la du mon ma un une des les avec dans sur qui est sont pas au aux et en sous entre vers chez
        leur leurs elle ils homme hommes femme femmes chien chiens chatte enfant enfants fille garçon maison
        voiture mer plage montagne montagnes neige forêt arbre eau rivière nuit jour gens joue jouent jouant
        saute danse dansent dansant chante chantent cuisiner cuisinant assis assise debout marche nage
        conduit rue ville ciel coucher soleil anniversaire mariage vélo cheval oiseau poisson feu musique
        rouge bleu bleue verte blanc blanche noir noire petit petite gâteau jardin pluie vacances noël
        guitare
        frère papillon piscine pompiers
        """
    ),
    "hu": _words(
        """
        egy az és van nem hogy férfi nő kutya macska gyerek gyerekek ház autó tenger hegy hó erdő fa víz
        folyó éjszaka lány fiú emberek fut játszik ugrik táncol énekel főz ül áll vezet úszik lovagol utca
        város ég naplemente születésnap esküvő bicikli ló madár hal tűz zene piros kék zöld kis nagy kertben
        konyhában tengerparton hóban karácsony
        """
    ),
    "id": _words(
        """
        yang dan di ke dari dengan untuk sedang ini itu ada tidak seorang seekor orang pria wanita lelaki
        perempuan anjing kucing anak rumah mobil laut pantai gunung salju hutan pohon sungai malam siang
        gadis berlari bermain melompat menari bernyanyi memasak duduk berdiri mengemudi berjalan berenang
        naik jalan kota langit matahari ulang tahun pernikahan sepeda kuda burung ikan api musik merah biru
        hijau putih hitam kecil besar taman dapur hujan makan
        """
    ),
    "it": _words(
        """
        del al la le di da il un una uno gli lo con nel nella sul sulla per che è sono non dei delle degli
        tra sotto sopra e uomo uomini donna donne cane cani gatto gatti bambino bambina bambini casa
        macchina mare spiaggia montagna montagne neve bosco albero acqua fiume notte giorno ragazza ragazzo
        gente corre correndo gioca giocano giocando salta balla ballando canta cantando cucina cucinando
        seduto seduta cammina nuota guida mangia città strada cielo tramonto sole compleanno matrimonio
        bicicletta cavallo uccello pesce fuoco musica calcio rosso rossa azzurro verde bianco bianca nero
        piccolo grande giardino pioggia natale chitarra
        farfalla fratello piscina treno
        """
    ),
    "nl": _words(
        """
        de den mijn een het op van niet voor naar uit onder tussen zijn haar wordt deze dit ook aan bij en
        vrouw vrouwen mannen hond honden kat katten kinderen huis strand zee berg bergen sneeuw bos boom
        water rivier nacht dag meisje jongen mensen loopt rent speelt spelen springt danst dansen zingt
        kookt koken zit staat rijdt zwemt fietst keuken straat stad lucht zonsondergang verjaardag bruiloft
        fiets paard vogel vissen vuur muziek voetbal blauwe groene witte zwarte kleine grote tuin regen
        kerst gitaar
        paarden taart trein vlinder zwembad
        """
    ),
    "pl": _words(
        """
        na w z i się jest są nie do po od dla przez który która mężczyzna kobieta kobiety pies psa kot kota
        dziecko dzieci dom samochód morze morzem plaża plaży góry śnieg śniegu las lesie drzewo woda wodzie
        rzeka noc dzień dziewczyna chłopiec ludzie biega biegnie gra gotuje skacze tańczy śpiewa siedzi stoi
        jedzie pływa kuchni ulica ulicy miasto niebo zachód słońca urodziny wesele rower koń ptak ryba ogień
        muzyka czerwony czerwona niebieski zielony mały duży ogrodzie deszcz obiad
        """
    ),
    "pt": _words(
        """
        de o a as do da um uma uns umas os com na no nas nos em por para que está estão é são não seu sua ao
        à pelo pela e homem homens mulher mulheres cachorro cachorros cão gato gatos menino menina crianças
        criança casa carro praia montanha montanhas neve floresta árvore água rio noite dia garota garoto
        pessoas gente corre correndo brincando joga jogando pula pulando dança dançando canta cantando
        cozinha cozinhando sentado caminhando nadando dirigindo comendo cidade rua céu sol pôr aniversário
        casamento bicicleta cavalo pássaro peixe fogo música futebol vermelho vermelha azul verde branco
        branca preto pequeno jardim chuva natal violão
        borboleta cavalos irmão piscina
        """
    ),
    "ro": _words(
        """
        un o și cu pe în la este sunt nu din lângă sub peste bărbat femeie câine pisică copil copii casă
        mașină mare plajă munte munți zăpadă pădure copac apă râu noapte zi fată băiat oameni aleargă joacă
        sare dansează cântă gătește stă conduce înoată merge stradă oraș cer apus soare naștere nuntă
        bicicletă cal pasăre pește foc muzică roșu albastru verde grădină bucătărie ploaie
        """
    ),
    "sv": _words(
        """
        och på en ett med av inte som är det mannen kvinna man hund katt hus bil strand havet berg snö skog
        träd vatten flod natt dag flicka pojke människor springer spelar hoppar dansar sjunger lagar sitter
        står kör simmar går gata stad himmel solnedgång födelsedag bröllop cykel häst fågel fisk eld musik
        röd röda blå gröna liten stor trädgård kök regn jul jag hon mellan under över
        """
    ),
    "sw": _words(
        """
        na ya wa za kwa ni katika mtu watu mwanaume mwanamke mbwa paka mtoto watoto nyumba gari bahari pwani
        mlima theluji msitu mti maji mto usiku mchana msichana mvulana anakimbia anacheza wanacheza anaruka
        anaimba anapika anakaa anasimama anaendesha anaogelea barabara mji anga jua harusi baiskeli farasi
        ndege samaki moto muziki nyekundu bluu kijani ndogo kubwa
        """
    ),
    "tl": _words(
        """
        ang ng mga sa na ay isang nang kay para lalaki babae aso pusa bata bahay kotse dagat bundok niyebe
        gubat puno tubig ilog gabi araw tao tumatakbo naglalaro tumatalon sumasayaw kumakanta nagluluto
        nakaupo nakatayo nagmamaneho lumalangoy naglalakad kalye lungsod langit kaarawan kasal bisikleta
        kabayo ibon isda apoy musika pula asul berde maliit malaki kumakain
        """
    ),
    "tr": _words(
        """
        bir ve ile için çok bu şu ne değil adam kadın köpek kedi çocuk çocuklar ev araba deniz denizde plaj
        sahilde dağ kar karda orman ağaç su nehir gece gün kız oğlan insanlar koşuyor koşan oynuyor oynayan
        zıplıyor dans ediyor şarkı söylüyor yemek pişiriyor pişiren oturuyor ayakta sürüyor yüzüyor yüzen
        sokak sokakta şehir gökyüzü batımı güneş günü düğün bisiklet at kuş balık ateş müzik kırmızı mavi
        yeşil küçük büyük bahçede mutfakta yağmur futbol
        """
    ),
    "vi": _words(
        """
        một và của trên trong với đang người đàn ông phụ nữ con chó mèo trẻ em nhà xe biển bãi núi tuyết
        rừng cây nước sông đêm ngày cô gái cậu bé chạy chơi nhảy múa hát nấu ăn ngồi đứng lái bơi đi đường
        thành phố bầu trời hoàng hôn sinh nhật đám cưới đạp ngựa chim cá lửa nhạc đỏ xanh trắng đen nhỏ lớn
        vườn bếp mưa
        """
    ),
}
"""The words of each language, by its code of ISO 639-1."""

ENGLISH = _words(
    """
    a about above across after again all along am an and another any are around as at away back be beach
    because been before behind below beside between big birthday black blue both boy boys brown but by can
    car cat catches child children city close coming cooking could dancing day did dog dogs doing down
    driving during each eating every face falling family fast few field fire first five flying food football
    for four friends from front game garden get getting girl girls goes going good gray green grey group guy
    had hair hand hands has have he head her here high him his holding home horse house how i in inside into
    is it its jumping jumps just kids kitchen large little long looking looks made make makes making man
    many me men more mountain mountains moving music my near new next nice night no not of off old on one or
    orange other our out outside over own park party people person photo picture pink plane play playing
    plays red riding road room running runs same scene see several she shirt short show showing shows side
    singing sings sits sitting sky slow small snow some someone something song stage standing stands street
    sun sunset swimming table taking talk talking talks team than that the their them then there these they
    things this three through time to together top train tree trees trying two under up us using very video
    view walking walks wall was watching water we wearing wedding were what when where which while white who
    wide window with without woman women wood work working yellow you young your
    """
)
"""Words that show a query to be English; some are words of other languages too and then say nothing."""

SHARED_WITH_ENGLISH = _words("a am as do in me no on was")
"""English words that other languages have too: next to one of theirs they say nothing."""

BORROWED = _words(
    """
    açai açaí brûlée café cafés cliché crème crêpe crêpes doppelgänger décor déjà entrée façade fiancé
    fiancée flambé jalapeño jalapeños matinée naïve piñata piñatas protégé purée puréed pâté risqué rosé
    résumé sauté sautéed sautéeing sautéing señor señora señorita smörgåsbord soufflé touché élite über
    plié döner
    """
)
"""English words that are written with accents."""
